"""Faults by the thousand: flipped bits, crashes at any call of a store, kills at any moment."""
