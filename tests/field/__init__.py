"""Faults that users of other libraries reported from the field.

Each ``test_row_NNN`` is one such report, numbered as in the project's collection of cases; numbers without a module
are cases that are covered elsewhere or not yet. A module's docstring names the report upstream and what must hold here.
"""
