"""Demo step: a generative model of the shop, steered by scenario and trigger item, with instructions written near-line.

Only the instruction distinguishes a detail page (the next item is of the same topic) from the cart (of the complementary one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nestpipe.cli.demo_shop import DemoShop, write_generative_log
from nestpipe.cli.demo_stage import DemoStage, check

if TYPE_CHECKING:
    from nestpipe.client import GeneratedItems  # it needs an optional package

_NUM_USERS, _K, _MIN_SHARE = 20, 5, 0.9
_COLUMNS = ("--user", "customer", "--item", "product", "--time", "when")
_ENCODINGS = ("--user-encoding", "dictionary", "--item-encoding", "dictionary")
_FEATURES = (
    "scenario:id:event:column=page:encoding=dictionary",
    "trigger:id:event:column=looked_at:encoding=item",
    "reasoning:vector:event:dim=512",
)


def generate(demo: DemoStage) -> str:
    """Builds semantic ids, trains with instructions, writes instructions, and checks that answers follow them."""
    shop, folder, run = DemoShop.make(quick=demo.quick), demo.out / "generative-shop", demo.out / "generative"
    folder.mkdir()
    log, titles = write_generative_log(folder, shop)
    data, ids = str(folder / "data"), str(folder / "ids")
    features = [word for one in _FEATURES for word in ("--feature", one)]
    demo.command("data", "ingest", str(log), *_COLUMNS, *_ENCODINGS, *features, "--texts", str(titles), "--out", data)
    demo.command("sid", "build", data, "--out", ids, "--encoder", "words", "--sid.levels", "2", "--sid.codes", "16")
    epochs = ["--train.epochs", "1" if demo.quick else "15"]
    demo.command("train", "scenarios", "--run", str(run), "--data.path", data, "--model.ids", ids, *epochs)
    demo.command("think", str(run))
    demo.serve("generator", str(run), says="serving")
    return _ask(demo, shop)


@dataclass(slots=True)
class _Followed:
    """Items answered in one scenario, and how many were of the requested topic."""

    num_items: int = 0
    num_right: int = 0

    @property
    def share(self) -> float:
        return self.num_right / self.num_items


def _ask(demo: DemoStage, shop: DemoShop) -> str:
    """Requests items for the same users and trigger items in two scenarios."""
    from nestpipe.client import Client

    url, sold = demo.services["generator"].url, {shop.items[item] for item in shop.world.items.ravel()}
    looked, bought = _Followed(), _Followed()
    fields = f'{{"user": "{shop.users[0]}", "trigger": ITEM, "scenario": "detail" and "cart", "k": {_K}}}'
    demo.say(f"POST {url}/v1/generate {fields} for {_NUM_USERS} customers")
    with Client(url, timeout_s=30.0) as client:
        for user, row in zip(shop.users[:_NUM_USERS], shop.world.items, strict=False):
            had = [shop.items[item] for item in row]
            topic = shop.topic_of(had[-1])
            wanted = {"detail": (looked, topic), "cart": (bought, int(shop.world.complements[topic]))}
            for scenario, (followed, right) in wanted.items():
                found = client.generate(user, _K, scenario=scenario, trigger=had[-1], deadline_ms=30_000)
                _check_answer(found, had, sold)
                followed.num_items += len(found.items)
                followed.num_right += sum(shop.topic_of(item) == right for item in found.items)
    seen = f"detail: {looked.share:.0%} of the trigger's topic, cart: {bought.share:.0%} of the one that goes with it"
    check(demo.quick or min(looked.share, bought.share) >= _MIN_SHARE, f"the instruction was not followed; {seen}")
    return f"{seen}; instructions by {found.instruction.written_by}"


def _check_answer(found: GeneratedItems, had: list[str], sold: set[str]) -> None:
    items = found.items
    check(len(set(items)) == len(items) == _K, f"{items} are not {_K} items")
    check(set(items) <= sold - set(had), f"{items} are not all new items of the shop")
    steered_by = found.instruction
    is_known = steered_by.source == "any" and steered_by.written_by and steered_by.written_s
    check(bool(is_known), f"the answer does not say which instruction steered it: {steered_by}")
