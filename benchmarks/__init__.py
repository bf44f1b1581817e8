"""Measurements that take long; each writes JSON under docs/results/ with its command and commit."""
