"""Tests of the papers' claims: studies of many trainings, which are run cell by cell."""
