import pytest

from normalnorm.experiments import results, tables


@pytest.fixture
def listed(monkeypatch):
    "Makes a recipe the only one that the package seems to have."

    def alone(recipe):
        for module in (results, tables):
            monkeypatch.setattr(module, "recipes", lambda: {"known": recipe})
        return recipe

    return alone
