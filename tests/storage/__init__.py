"""A server's log in a directory or in etcd: committed records survive every crash, and damage is always detected."""
