"""A local etcd cluster, for trials and tests."""
