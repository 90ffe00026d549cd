"""The replicated log in etcd."""
