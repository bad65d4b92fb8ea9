"""Scheduling for both engines: the choice of the requests that take part in each model step."""
