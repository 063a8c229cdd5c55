"""Mechanisms that protect the labels of records whose features are public."""
