"""Tests that run where the stand-in is the process' libcuda (../test_releases.py starts them)."""
