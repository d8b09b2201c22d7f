"""A cluster over several hosts, each a network namespace, and faults of their links, hosts and directions."""
