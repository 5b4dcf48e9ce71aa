"""Tests of kvtier."""
