"""The papers' claims, tested: studies of many trainings, filled cell by cell."""
