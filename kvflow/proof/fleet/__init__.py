"""A simulator of a whole fleet: thousands of bare endpoints, an hour of virtual time.

`proof.bare` checks everything that a few nodes do, and remembers all of it. Here a million rooms
pass through ten thousand endpoints, so the checks keep nothing about a room that has ended: who
owns each page, what it contains, that every room ends once and in time, and how large each table
of an endpoint becomes.
"""
