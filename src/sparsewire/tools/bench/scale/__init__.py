"""Bytes and time of a step against the number of hosts: measured for a few, modelled for many."""
