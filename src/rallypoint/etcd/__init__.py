"""A store in etcd: a thin client of etcd's v3 API, and every store operation as transactions on it."""
