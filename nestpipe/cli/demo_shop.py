"""Demo steps of a new user: a shop's log with text ids becomes recommendations by command, over HTTP and on a page.

The log is generated. Customers look at home, detail and cart pages. After a detail page the next item is of the same topic as
the item that was looked at; in the cart it is of the complementary topic.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from nestpipe.cli.demo_stage import DemoStage, check
from nestpipe.data.synthetic_scenarios import SCENARIOS, ScenarioLog, ScenarioLogConfig
from nestpipe.eval.eval_report import EvalReport
from nestpipe.generative.text_encoder import hashed_words
from nestpipe.training.trained_run import load

_START, _HOUR = 1_772_359_200, 3600  # seconds
_NAMES = ("anna", "björn", "chloé", "dmitri", "émile", "fatima", "giulia", "hành")
_K, _NUM_ASKED = 5, 3
_PATIENT = tuple(  # on a busy machine
    word for stage in ("retrieval", "prerank", "rank") for word in (f"--stages.{stage}-ms", "60000")
)


@dataclass(frozen=True, slots=True, eq=False)
class DemoShop:
    """The generated log and the names of its users and items."""

    world: ScenarioLog
    users: list[str]
    items: list[str]

    @staticmethod
    def make(*, quick: bool) -> DemoShop:
        size = {"num_users": 60, "num_events": 12} if quick else {"num_users": 300, "num_events": 24}
        config = ScenarioLogConfig(num_topics=8, num_styles=2, per_style=8, anchored=1.0, noise=0.0, **size)
        world = ScenarioLog.make(config)
        users = [f"{_NAMES[number % len(_NAMES)]} {number}" for number in range(config.num_users)]
        return DemoShop(world, users, [title.replace(" ", "-") for title in world.texts()])

    def topic_of(self, item: int | str) -> int:
        """The topic of an item."""
        per_topic = len(self.items) // self.world.config.num_topics
        return self.items.index(str(item)) // per_topic

    def log(self) -> pl.DataFrame:
        """One row per event, with the reasoning vector that an instruction would have had."""
        users, events = np.indices(self.world.items.shape)
        names = np.array([*self.items, ""])  # the last one for -1, no trigger
        reasoning = hashed_words(self.world.instructions()).numpy()[self.world.named_topics.ravel()]
        times = pl.Series(1000 * (_START + _HOUR * events.ravel()), dtype=pl.Int64).cast(pl.Datetime("ms"))
        return pl.DataFrame(
            {
                "customer": np.array(self.users)[users.ravel()],
                "product": names[self.world.items.ravel()],
                "when": times.dt.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "page": np.array(SCENARIOS)[self.world.scenarios.ravel()],
                "looked_at": names[self.world.triggers.ravel()],
                "bought": (self.world.behaviours.ravel() > 0).astype(np.int64),
                "reasoning": pl.Series(reasoning, dtype=pl.Array(pl.Float32, reasoning.shape[1])).arr.to_list(),
            }
        )

    def titles(self) -> pl.DataFrame:
        return pl.DataFrame({"product": self.items, "title": self.world.texts()})


def start(demo: DemoStage) -> str:
    """A log with text ids becomes a trained, evaluated and reported run, by one command."""
    shop, folder = DemoShop.make(quick=demo.quick), demo.out / "shop"
    folder.mkdir()
    shop.log().drop("reasoning").write_csv(folder / "log.csv")
    demo.say(f"a shop's log, {folder / 'log.csv'}:\n{(folder / 'log.csv').read_text()[:150]}...")
    epochs = "2" if demo.quick else "15"
    label = ["--feature", "bought:number:event", "--label", "buys:binary:feature=bought"]
    demo.say(demo.command("start", str(folder / "log.csv"), "--out", str(folder), *label, "--epochs", epochs, "--yes"))
    report, page = EvalReport.load(folder / "run" / "eval" / "test"), (folder / "run" / "report.html").read_text()
    hr10, baselines = report.metrics["hr@10"].mean, json.loads((folder / "run/eval/test/context.json").read_text())
    popular = baselines["baselines"]["popularity baseline"]["hr@10"]["mean"]
    check(demo.quick or hr10 > popular, f"HR@10 {hr10:.4f} is not above that of popular items, {popular:.4f}")
    check(any(user in page for user in shop.users), f"{folder / 'run' / 'report.html'} names no customer")
    return f"HR@10 {hr10:.4f}, popular items {popular:.4f}; report: {folder / 'run' / 'report.html'}"


def recommend(demo: DemoStage) -> str:
    """Recommendations and similar items by command, in the ids of the log; none is in the customer's history."""
    folder = demo.out / "shop"
    log = pl.read_csv(folder / "log.csv")
    user = log["customer"][-1]
    answer = json.loads(
        demo.command("recommend", str(folder / "run"), "--user", user, "--k", str(_K), "--json").splitlines()[-1]
    )
    had = set(log.filter(pl.col("customer") == user)["product"])
    items, known = answer["items"], set(log["product"])
    check(len(set(items)) == _K and set(items) <= known - had, f"bad recommendation {items} for {user}, who had {had}")
    alike = json.loads(demo.command("similar", str(folder / "run"), "--item", items[0], "--k", "3", "--json"))["items"]
    check(len(set(alike)) == 3 and set(alike) <= known - {items[0]}, f"bad items like {items[0]}: {alike}")
    file = folder / "recommendations.parquet"
    demo.command("recommend", str(folder / "run"), "--all", "--out", str(file))
    table = pl.read_parquet(file)
    check(set(table["user"]) == set(log["customer"]), f"{file} has {table['user'].n_unique():,} customers")
    return (
        f"{user}: {', '.join(items[:3])}, ...; like {items[0]}: {', '.join(alike)}; {len(table):,} rows in {file.name}"
    )


def ask(demo: DemoStage) -> str:
    """The same recommendations over HTTP: by POST, by GET, and what an event changes at once."""
    import httpx

    from nestpipe.client import Client

    folder = demo.out / "shop"
    service, offline = demo.serve("shop", str(folder / "run"), says="serving"), load(folder / "run")
    users = offline.users[:: max(len(offline.users) // _NUM_ASKED, 1)][:_NUM_ASKED]
    demo.say(f'POST {service.url}/v1/recommend {{"user": "{users[0]}", "k": {_K}}}, and GET')
    with Client(service.url, timeout_s=30.0) as client:
        for user in users:
            wanted = offline.recommend(user, k=_K)["item"].to_list()
            found = client.recommend(user, _K, deadline_ms=30_000)
            check(found.items == wanted, f"{user}: {found.items} over HTTP, {wanted} offline")
            got = httpx.get(f"{service.url}/v1/recommend/{user}", params={"k": _K}, timeout=30.0).json()["items"]
            check(got == wanted, f"{user}: {got} by GET, {wanted} by POST")
        user, item = users[0], offline.recommend(users[0], k=1)["item"][0]
        client.send_events([{"id": "demo-1", "user": user, "item": item, "time": _START + 90 * 86_400, "bought": 1}])
        after = client.recommend(user, len(offline.items), deadline_ms=30_000).items
        check(item not in after, f"{user} has just had {item}, and it is recommended again")
    return f"{len(users)} customers: HTTP answers are those of the command; {user} had {item}, it is no longer shown"


def show_page(demo: DemoStage) -> str:
    """A ranker orders what the first run retrieves; a page shows customers, histories and recommendations."""
    import httpx

    from nestpipe.client import Client

    folder = demo.out / "shop"
    epochs = "1" if demo.quick else "3"
    demo.command(
        *("train", "ranker", "--data.path", str(folder / "data"), "--train.epochs", epochs),
        *("--run", str(folder / "ranker")),
    )
    flags = ("--retrieval", str(folder / "run"), "--instances", "1", "--demo", *_PATIENT)
    service = demo.serve("page", str(folder / "ranker"), *flags, says="gateway with")
    page = httpx.get(service.url, timeout=30.0)
    check(page.status_code == 200 and "<html" in page.text, f"{service.url} shows no page: {page.status_code}")
    users = httpx.get(f"{service.url}/page/users", timeout=30.0).json()["users"]
    log = pl.read_csv(folder / "log.csv")
    check(bool(users) and set(users) <= set(log["customer"]), f"the page offers {users[:5]}")
    with Client(service.url, timeout_s=120.0) as client:
        found = client.recommend(users[0], _K)
    check(len(found.items) == _K and set(map(str, found.items)) <= set(log["product"]), f"bad answer {found.items}")
    return f"{service.url}/ shows {len(users)} customers; {users[0]}: {', '.join(map(str, found.items[:3]))}, ..."


def write_generative_log(folder: Path, shop: DemoShop) -> tuple[Path, Path]:
    """The log with reasoning vectors, and titles, as files."""
    shop.log().write_parquet(folder / "log.parquet")
    shop.titles().write_csv(folder / "titles.csv")
    return folder / "log.parquet", folder / "titles.csv"
