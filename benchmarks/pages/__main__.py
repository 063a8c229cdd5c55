"""Renew the pages."""

from benchmarks.pages import main

main()
