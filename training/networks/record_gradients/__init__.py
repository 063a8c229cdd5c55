"""Measure, clip and sum the gradients of single records, for any module that processes records independently."""
