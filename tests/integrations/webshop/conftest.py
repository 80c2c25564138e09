"""A shop of five products, written as the official `setup.sh` leaves its files, and the official data where it is."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dreamgym_lg.types import Task

DATA = Path(__file__).parents[4] / "shared" / "data"
SIZES = [{"value": "Small"}, {"value": " Large/Tall "}]
COLORS = [{"value": "Red"}, {"value": "Navy Blue"}, {"value": "Small"}]


def item(asin: str, name: str, **more: Any) -> dict[str, Any]:
    """A product as `items_shuffle.json` has it."""
    return {
        "asin": asin,
        "name": name,
        "full_description": "",
        "small_description": [""],
        "pricing": "$20.00",
        "customization_options": "",
        "category": "fashion",
        "query": "mens shirts ",
        "product_category": "Clothing › Men › Shirts",
        **more,
    }


ITEMS = [
    item("B000000001", "Cotton Shirt for Men", customization_options={"Size": SIZES, "Color": COLORS, "Fit": None}),
    item("B000000002", "Linen Shirt", full_description="  soft\n linen ", small_description=["cool", " ", "washable"]),
    item("B000000003", "Garden Lamp", pricing="$5.00$9.00", category="garden", query="Lamps", product_category="Home › Light"),
    item("B000000004", "Odd Box", customization_options={"Kind": [{"value": "Description"}, {"value": "a [b]"}]}),
    item("B000000004", "The same code again"),
    item("B000000005", "Gold Watch", pricing="$985.50", small_description="shines"),
]
INSTRUCTIONS = {
    "B000000001": {
        "attributes": ["cotton blend", "machine wash"],
        "instruction": "Find me machine wash men's shirts",
        "instruction_attributes": ["machine wash"],
    },
    "B000000002": {"attributes": ["linen"]},
    "B000000003": {"attributes": ["solar"], "instruction": "Find me solar lamps", "instruction_attributes": ["solar"]},
    "B000000004": {"attributes": ["odd"], "instruction": "Find me odd boxes", "instruction_attributes": ["odd"]},
    "B000000005": {"attributes": ["gold"], "instruction": "Find me gold watches", "instruction_attributes": ["gold"]},
}
WRITTEN = {
    "B000000001": [
        {"instruction": "i want a red shirt.", "instruction_attributes": ["machine wash"], "instruction_options": ["red"]},
        {"instruction": "any shirt", "instruction_attributes": [], "instruction_options": []},
    ]
}


def write_shop(folder: Path, items: list[dict[str, Any]], ending: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        (f"items_shuffle{ending}", items),
        (f"items_ins_v2{ending}", INSTRUCTIONS),
        ("items_human_ins", WRITTEN),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="package", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Indexes are kept in a folder of the tests, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="package")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop"), ITEMS)


@pytest.fixture(scope="package")
def official() -> Callable[[str], Path]:
    return _official


def _official(name: str) -> Path:
    file = DATA / name
    if not file.exists():
        pytest.skip(f"needs the official data: {file} (the folder shared/ beside the checkout)")
    return file


@pytest.fixture(scope="package")
def small() -> Path:
    """The official 1,000 products."""
    return _official("webshop_small.json.xz")


@pytest.fixture(scope="package")
def tasks(shop: Path) -> list[Task]:
    from dreamgym_lg.integrations.webshop.data import load_tasks

    return load_tasks(shop)


@pytest.fixture
def fresh_shop() -> Callable[..., Path]:
    """Writes the same shop to a folder; further arguments change the linen shirt."""

    def write(folder: Path, *, ending: str = "", **linen: Any) -> Path:
        return write_shop(folder, [{**each, **linen} if each["name"] == "Linen Shirt" else each for each in ITEMS], ending)

    return write
