"""Tests of the store in etcd, and the clusters that they use."""
