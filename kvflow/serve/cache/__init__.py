"""The tiers of the prefix cache: pages that outlive the request that computed them.

What is where, and what goes first, is decided by `protocols.cache`; here are the memory, the
copies, the stores, and who is told of what is cached."""
