"""Runs a recording again and finds the first thing that differs."""
