"""Synthetic log of scenarios and hidden intents, with a known optimum.

An item has a topic and a style, both in its text; a topic has a complement. A user has a few favourite topics, a preferred
style in every topic, and a hidden intent (a topic) that switches at random. For each event

    P(item) = noise / I + (1 - noise) * sum over topics of m[topic] * P(item | topic, the user's style there)

    feed     m = the intent
    detail   m = half the topic of the trigger item, half the intent
    cart     m = half the complement of the trigger's topic, half the intent

The trigger is independent of the intent. An instruction names the intent with probability `accuracy`, otherwise an
independent topic, so at accuracy 0 it is uninformative. All other draws are the same for every accuracy.

The optimum knows the user's favourites, styles and past intents, and infers the present intent by Bayes' rule. A model has
to estimate these from the history, so none can expect more. The utility of an item in a scenario is a second objective:
m[topic] * (0.5, or 0.7 in the preferred style) + 0.3 * the item's value in the scenario.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from nestpipe.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

SCENARIOS = ("feed", "detail", "cart")
_SCENARIO_SHARE = (0.4, 0.3, 0.3)
_FAVOURITE_SHARE = (0.4, 0.35, 0.25)
_STYLES = ("plain", "bold", "light", "retro", "royal", "tiny", "rough", "smart")
_TOPICS = (
    "garden",
    "camera",
    "kitchen",
    "bicycle",
    "guitar",
    "tent",
    "aquarium",
    "puzzle",
    "lamp",
    "carpet",
    "drone",
    "piano",
    "sofa",
    "kettle",
    "easel",
    "racket",
    "helmet",
    "telescope",
    "blender",
    "skate",
    "printer",
    "canoe",
    "quilt",
    "violin",
)
_BEHAVIOUR_SHARE = (0.6, 0.25, 0.15)  # click, cart, order


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioLogConfig:
    """The size of the log and how informative its instructions are."""

    num_users: int = 1200
    num_events: int = 48
    """Events of every user; the last is the test."""
    num_topics: int = 16
    num_styles: int = 4
    per_style: int = 4
    """Items per style and topic, the k-th with a share proportional to 1 / k."""
    accuracy: float = 0.9
    """Probability that an instruction names the intent; otherwise it names a random topic."""
    switch: float = 0.5
    """Probability that the intent is drawn anew at an event."""
    faithful: float = 0.7
    """Probability that a new intent is one of the favourites; otherwise any topic."""
    anchored: float = 0.5
    """detail, cart: the share of the trigger's topic or its complement."""
    style_share: float = 0.8
    """Share of the preferred style within a topic."""
    noise: float = 0.05
    """Share of events with a uniformly random item."""
    seed: int = 0

    def problems(self) -> Iterator[str]:
        if self.num_users < 1 or self.num_events < 2 or self.per_style < 1:
            yield f"num_users {self.num_users}, num_events {self.num_events}, per_style {self.per_style}; they must be at least 1, 2 and 1"
        if not 4 <= self.num_topics <= len(_TOPICS):
            yield f"num_topics is {self.num_topics}; it must be in 4 .. {len(_TOPICS)}"
        if not 2 <= self.num_styles <= len(_STYLES):
            yield f"num_styles is {self.num_styles}; it must be in 2 .. {len(_STYLES)}"
        for name in ("accuracy", "switch", "faithful", "anchored", "style_share", "noise"):
            if not 0 <= getattr(self, name) <= 1:
                yield f"{name} is {getattr(self, name)}; it must be in 0 .. 1"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of topics, styles and items per style: mixed-radix digits of an item id, and its semantic id."""
        return self.num_topics, self.num_styles, self.per_style

    @property
    def num_items(self) -> int:
        return self.num_topics * self.num_styles * self.per_style


@dataclass(frozen=True, slots=True)
class Optimum:
    """Expected metrics of the best possible ranking on the last events, and the utility of its first item."""

    hr1: float
    hr10: float
    ndcg10: float
    utility: float


@dataclass(frozen=True, slots=True, eq=False)
class ScenarioLog:
    """All events [U, E] of all users; `triggers` is -1 if there is none."""

    config: ScenarioLogConfig
    complements: Ints  # [topics]
    values: Floats  # [scenarios, items], hundredths
    favourites: Ints  # [U, 3]
    styles: Ints  # [U, topics]
    scenarios: Ints
    triggers: Ints
    intents: Ints
    named_topics: Ints  # in the instruction
    items: Ints
    behaviours: Ints  # 0 click, 1 cart, 2 order

    @staticmethod
    def make(config: ScenarioLogConfig) -> ScenarioLog:
        """Draws the log of a config; raises ConfigError."""
        if problems := list(config.problems()):
            raise ConfigError("the scenario log has problems: " + "; ".join(problems) + ".")
        shape = (config.num_users, config.num_events)
        rng = np.random.default_rng([config.seed, 10])
        cycle = rng.permutation(config.num_topics)
        complements = np.empty_like(cycle)
        complements[cycle] = np.roll(cycle, 1)
        values = rng.integers(0, 101, (len(SCENARIOS), config.num_items)) / 100
        rng = np.random.default_rng([config.seed, 11])
        favourites = rng.random((config.num_users, config.num_topics)).argsort(1)[:, : len(_FAVOURITE_SHARE)]
        styles = rng.integers(0, config.num_styles, (config.num_users, config.num_topics))
        rng = np.random.default_rng([config.seed, 12])
        scenarios = rng.choice(len(SCENARIOS), shape, p=_SCENARIO_SHARE)
        topics = np.take_along_axis(favourites, rng.choice(len(_FAVOURITE_SHARE), shape, p=_FAVOURITE_SHARE), 1)
        inside = rng.integers(0, config.num_items // config.num_topics, shape)
        triggers = np.where(scenarios > 0, topics * (config.num_items // config.num_topics) + inside, -1)
        intents = _draw_intents(config, favourites)
        rng = np.random.default_rng([config.seed, 13])
        is_right = rng.random(shape) < config.accuracy  # the same draws for every accuracy
        named_topics = np.where(is_right, intents, rng.integers(0, config.num_topics, shape))
        world = ScenarioLog(
            config,
            complements,
            values,
            favourites,
            styles,
            scenarios,
            triggers,
            intents,
            named_topics,
            np.zeros(shape, dtype=np.int64),
            np.random.default_rng([config.seed, 14]).choice(3, shape, p=_BEHAVIOUR_SHARE),
        )
        rng = np.random.default_rng([config.seed, 15])
        for place in range(config.num_events):
            chances = world.chances(place, _one_hot(intents[:, place], config.num_topics))
            drawn = rng.random((config.num_users, 1)) * chances.sum(1, keepdims=True)
            world.items[:, place] = (chances.cumsum(1) < drawn).sum(1).clip(max=config.num_items - 1)
        return world

    def texts(self) -> list[str]:
        """The text of each item."""
        numbers = zip(*np.unravel_index(np.arange(self.config.num_items), self.config.sizes), strict=True)
        return [f"{_STYLES[style]} {_TOPICS[topic]} no{place}" for topic, style, place in numbers]

    def instructions(self) -> list[str]:
        """The instruction text for each topic."""
        return [f"looking for {_TOPICS[topic]}" for topic in range(self.config.num_topics)]

    def chances(self, place: int, intent: Floats) -> Floats:
        """P(item) [U, I] of each user's event at a place, with the intent's distribution [U, topics]."""
        config = self.config
        serial = 1.0 / np.arange(1, config.per_style + 1)
        style = np.full((config.num_users, *config.sizes[:2]), (1 - config.style_share) / (config.num_styles - 1))
        np.put_along_axis(style, self.styles[:, :, None], config.style_share, 2)
        within = style[:, :, :, None] * (serial / serial.sum())
        found = self._relevance(place, intent)[:, :, None, None] * within
        chances: Floats = (1 - config.noise) * found.reshape(config.num_users, -1) + config.noise / config.num_items
        return chances

    def utilities(self, place: int, intent: Floats) -> Floats:
        """The utility [U, I] of every item for each user's event at a place; linear in the intent's distribution."""
        config = self.config
        right = np.full((config.num_users, *config.sizes[:2]), 0.5)
        np.put_along_axis(right, self.styles[:, :, None], 0.7, 2)
        relevant = (self._relevance(place, intent)[:, :, None] * right).reshape(config.num_users, -1)
        found: Floats = relevant.repeat(config.per_style, 1) + 0.3 * self.values[self.scenarios[:, place]]
        return found

    def known_intent(self, place: int) -> Floats:
        """Posterior [U, topics] of the present intent, given the previous intent and the instruction."""
        config = self.config
        known = _prior(config, self.favourites)
        if place:
            before = _one_hot(self.intents[:, place - 1], config.num_topics)
            known = config.switch * known + (1 - config.switch) * before
        named = _one_hot(self.named_topics[:, place], config.num_topics)
        known = known * (config.accuracy * named + (1 - config.accuracy) / config.num_topics)
        return np.asarray(known / known.sum(1, keepdims=True))

    def optimum(self) -> Optimum:
        """Expected metrics of the best possible ranking on the last events."""
        place = self.config.num_events - 1
        intent = self.known_intent(place)
        top = -np.sort(-self.chances(place, intent), axis=1)[:, :10]
        discounts = 1 / np.log2(np.arange(10) + 2)
        return Optimum(
            hr1=float(top[:, 0].mean()),
            hr10=float(top.sum(1).mean()),
            ndcg10=float((top @ discounts).mean()),
            utility=float(self.utilities(place, intent).max(1).mean()),
        )

    def digest(self) -> str:
        """A hash of everything that a model or metric reads."""
        content = blake2b(digest_size=16)
        for one in (self.complements, (self.values * 100).round().astype(np.int64), self.favourites, self.styles):
            content.update(np.ascontiguousarray(one).tobytes())
        for one in (self.scenarios, self.triggers, self.intents, self.named_topics, self.items, self.behaviours):
            content.update(np.ascontiguousarray(one).tobytes())
        content.update("\n".join([*self.texts(), *self.instructions()]).encode())
        return content.hexdigest()

    def _relevance(self, place: int, intent: Floats) -> Floats:
        """m [U, topics] of the module docstring."""
        config, scenario = self.config, self.scenarios[:, place]
        anchor = self.triggers[:, place].clip(min=0) // (config.num_items // config.num_topics)
        anchor = np.where(scenario == SCENARIOS.index("cart"), self.complements[anchor], anchor)
        share = np.where(scenario > 0, config.anchored, 0.0)[:, None]
        return np.asarray(share * _one_hot(anchor, config.num_topics) + (1 - share) * intent)


def _draw_intents(config: ScenarioLogConfig, favourites: Ints) -> Ints:
    shape = (config.num_users, config.num_events)
    rng = np.random.default_rng([config.seed, 16])
    fresh = np.take_along_axis(favourites, rng.choice(len(_FAVOURITE_SHARE), shape, p=_FAVOURITE_SHARE), 1)
    fresh = np.where(rng.random(shape) < config.faithful, fresh, rng.integers(0, config.num_topics, shape))
    switches = rng.random(shape) < config.switch
    switches[:, 0] = True
    last = np.maximum.accumulate(np.where(switches, np.arange(config.num_events), 0), 1)
    return np.take_along_axis(fresh, last, 1)


def _prior(config: ScenarioLogConfig, favourites: Ints) -> Floats:
    """The distribution [U, topics] of a new intent."""
    found = np.full((config.num_users, config.num_topics), (1 - config.faithful) / config.num_topics)
    for column, share in enumerate(_FAVOURITE_SHARE):
        found[np.arange(config.num_users), favourites[:, column]] += config.faithful * share
    return found


def _one_hot(places: Ints, size: int) -> Floats:
    found = np.zeros((len(places), size))
    found[np.arange(len(places)), places] = 1.0
    return found
