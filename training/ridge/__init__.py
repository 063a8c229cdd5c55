"""Fit a linear model in closed form, with a private form for labels."""
