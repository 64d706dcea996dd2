import pytest
from page_server import save_model, serving


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A run of v3 (its best model) and one of the baseline."""
    place = tmp_path_factory.mktemp("runs")
    save_model(place / "v3" / "best")
    save_model(place / "baseline" / "best", "baseline-tiny")
    return [str(place / "v3"), str(place / "baseline")]


@pytest.fixture(scope="session")
def served(folders):
    with serving(folders) as server:
        yield server
