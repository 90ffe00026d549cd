"""Several servers with one log in etcd: leader election, failover, and notices to clients."""
