"""Which tests run in the same process: those that share compiled functions."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        rule = getattr(item, "callspec", None) and item.callspec.params.get("name")
        group = (
            f"{item.path.name}-{rule}" if rule and item.path.name == "test_conformance.py" else item.path.name
        )
        item.add_marker(pytest.mark.xdist_group(group))
