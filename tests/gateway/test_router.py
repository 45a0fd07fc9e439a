"""Routing as pure logic: who owns a user, what load and membership change, which tickets are believed."""

from __future__ import annotations

import base64
import hmac
import json
from dataclasses import asdict, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from nestpipe.gateway.router import (
    InstanceAddress,
    Members,
    RouterError,
    Ticket,
    TicketError,
    order_of,
    peek_instance,
    rendezvous,
    sign,
    verify,
)
from nestpipe.serve.config import MAX_TICKET_CHARS, MAX_TICKET_S, EngineConfig
from nestpipe.serve.route_headers import session_of

SECRET = b"sixteen bytes or more"
NOW = 1_700_000_000.0
TICKET = Ticket(request="r-1", instance="b", epoch="e1", key="ab12", expiry=NOW + 5, query_time=1_699_999_999)
NAMES = ["a", "b", "c", "d"]
INT64 = st.integers(-(2**63), 2**63 - 1)


def fleet(*names: str) -> Members:
    return Members(InstanceAddress(name=name, url=f"http://{name}") for name in names)


def owners(members: Members, users: range) -> list[str]:
    return [members.order(user)[0].name for user in users]


def test_the_hash_is_fixed():
    """Gateways of two versions must agree; these numbers may never change."""
    assert [rendezvous(user, name) for user, name in ((0, "a"), (1, "a"), (-1, "b"))] == FIXED


FIXED = [0x4525565A0525977C, 0x225188234D415705, 0xD98C83D902981BAE]


@given(INT64, st.permutations(NAMES))
def test_all_gateways_agree_whatever_the_order_they_heard_of_the_instances(user, names):
    assert [one.name for one in fleet(*names).order(user)] == [one.name for one in fleet(*NAMES).order(user)]


def test_users_are_shared_evenly():
    counts = np.unique(owners(fleet(*NAMES), range(8000)), return_counts=True)[1]
    # Each count is binomial(8000, 1/4): mean 2000, deviation 39; five of them.
    assert np.abs(counts - 2000).max() < 5 * 39


def test_an_instance_that_joins_takes_its_share_and_moves_nobody_else():
    members, users = fleet(*NAMES), range(8000)
    before = owners(members, users)
    members.join("e", "http://e")
    after = owners(members, users)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"e"}
    assert abs(len(moved) - 8000 / 5) < 5 * 36  # binomial(8000, 1/5) deviates by 36


def test_users_of_an_instance_that_leaves_go_to_the_next_in_their_order():
    members = fleet(*NAMES)
    orders = {user: [one.name for one in members.order(user)] for user in range(500)}
    members.leave("c")
    for user, order in orders.items():
        assert [one.name for one in members.order(user)] == [name for name in order if name != "c"]


def test_draining_keeps_tickets_and_takes_nobody_new():
    members, text = fleet("a", "b"), sign(TICKET, SECRET)
    members.drain("b")
    assert set(owners(members, range(100))) == {"a"}
    assert [one.name for one in members.follow(text, 7)] == ["b", "a"]
    assert [one.name for one in members.follow(None, 7, chosen="b")] == ["a"]
    members.join("b", "http://b2")
    assert set(owners(members, range(100))) == {"a", "b"}
    members.drain("a")
    members.leave("b")
    with pytest.raises(RouterError, match="none of the 1 instances takes requests"):
        members.choose(7, {})
    with pytest.raises(RouterError, match="none of the 1 instances"):
        members.follow(text, 7)
    with pytest.raises(RouterError, match=r"there is no instance 'b'; there are: a\."):
        members.leave("b")


@given(INT64, st.dictionaries(st.sampled_from(NAMES), st.integers(0, 50)))
def test_load_moves_a_signal_along_the_users_order_and_no_further_than_needed(user, loads):
    members = fleet(*NAMES)
    order, chosen = [one.name for one in members.order(user)], members.choose(user, loads).name
    mean = (sum(loads.values()) + 1) / 4
    assert loads.get(chosen, 0) < max(4, 1.25 * mean + 1)
    for name in order[: order.index(chosen)]:
        assert loads[name] >= max(4, 1.25 * mean)


def test_ranking_follows_the_ticket_whatever_the_load_has_become():
    members = fleet(*NAMES)
    user = next(user for user in range(100) if members.order(user)[0].name == "a")
    chosen = members.choose(user, {"a": 50})
    assert chosen.name != "a"
    text = sign(replace(TICKET, instance=chosen.name), SECRET)
    assert members.follow(text, user)[0] == chosen
    assert members.follow(None, user, chosen=chosen.name)[0] == chosen
    members.leave(chosen.name)
    assert [one.name for one in members.follow(text, user)] == [one.name for one in members.order(user)]


def test_those_thought_down_are_asked_last():
    members = fleet("a", "b", "c")
    down = members.order(5)[0].name
    assert members.order(5, last={down})[-1].name == down
    assert members.choose(5, {}, last={down}).name == members.order(5)[1].name


@given(INT64, st.dictionaries(st.sampled_from(NAMES), st.integers(0, 50), min_size=1))
def test_a_header_routes_as_a_gateway_does(user, loads):
    """The signal by the user and the load, the ranking by its ticket, and every instance once."""
    own = fleet(*loads)
    order = order_of(session_of(user), loads, request="q")
    assert order[0] == own.choose(user, loads).name
    assert order[1:] == [one.name for one in own.order(user) if one.name != order[0]]
    for name in NAMES:
        ticket = sign(replace(TICKET, instance=name), SECRET)
        follow = [one.name for one in own.follow(ticket, user)]
        assert order_of(session_of(user, ticket), loads, request="q") == follow
        assert follow[0] == (name if name in loads else own.order(user)[0].name)
        assert name not in loads or order_of(session_of(None, ticket), loads, request="q")[0] == name


@given(st.text() | st.none())
def test_what_is_no_ticket_is_not_put_into_a_header(text):
    session = session_of(7, text)
    assert session in {f"7/{text}", "7"}
    assert session.isascii()
    assert session.isprintable()
    assert session_of(None, sign(TICKET, SECRET)) == f"/{sign(TICKET, SECRET)}"


def test_a_header_without_a_user_goes_anywhere():
    loads = dict.fromkeys(NAMES, 0)
    assert {order_of("", loads, request=f"q{number}")[0] for number in range(100)} == set(NAMES)
    assert sorted(order_of("/no ticket", loads, request="q")) == sorted(NAMES)


@given(st.text(min_size=1) | st.integers(-(2**63), 2**63 - 1))
def test_a_user_is_found_by_the_header_whatever_the_id_is(user):
    """Proxies that read headers and gateways that read bodies send a user to one instance, as a number or as its text."""
    own, loads = Members(InstanceAddress(name=name, url="") for name in NAMES), dict.fromkeys(NAMES, 0)
    order = [one.name for one in own.order(user)]
    session = session_of(user)
    assert session.isascii()
    assert session.isprintable()
    assert "/" not in session
    assert order_of(session, loads, request="q") == order
    assert [one.name for one in own.order(str(user))] == order


def test_a_ticket_comes_back_as_it_was():
    assert verify(sign(TICKET, SECRET), SECRET, now=NOW) == TICKET
    without = replace(TICKET, query_time=None)
    assert verify(sign(without, SECRET), SECRET, now=NOW) == without


@given(st.data())
def test_a_ticket_changed_anywhere_is_refused(data):
    text = sign(TICKET, SECRET)
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(max_codepoint=300).filter(lambda char: char != text[place]))
    with pytest.raises(TicketError):
        verify(text[:place] + other + text[place + 1 :], SECRET, now=NOW)
    with pytest.raises(TicketError):
        verify(text[:place], SECRET, now=NOW)


@given(st.text(max_size=50))
def test_no_text_makes_anything_but_a_ticket_error(text):
    for forged in (text, f"v1.{text}", f"v1.{text}.{text}"):
        with pytest.raises(TicketError):
            verify(forged, SECRET, now=NOW)
        assert peek_instance(forged) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (sign(TICKET, b"another secret, as long"), "signature"),
        (sign(replace(TICKET, expiry=NOW), SECRET), "expired 0.0 s ago"),
        (sign(replace(TICKET, expiry=NOW - 3600), SECRET), "expired 3600.0 s ago"),
        (sign(replace(TICKET, expiry=NOW + 3600), SECRET), "a clock has jumped back"),
        ("v2" + sign(TICKET, SECRET)[2:], "version 'v2'"),
        (sign(TICKET, SECRET) + "=", "signature"),
        ("v1." + "a" * MAX_TICKET_CHARS, "at most 1,024"),
        (None, "no ticket"),
    ],
)
def test_tickets_that_are_refused(text, reason):
    with pytest.raises(TicketError, match=reason):
        verify(text, SECRET, now=NOW)


def signed(content: object) -> str:
    """A ticket with any content and a right signature."""

    def encode(raw: bytes) -> str:
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")

    body = f"v1.{encode(json.dumps(content).encode())}"
    return f"{body}.{encode(hmac.digest(SECRET, body.encode(), 'sha256'))}"


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        asdict(TICKET) | {"more": 1},
        asdict(TICKET) | {"expiry": float("nan")},
        asdict(TICKET) | {"expiry": 10**400},
        asdict(TICKET) | {"expiry": True},
        asdict(TICKET) | {"query_time": 1.5},
        asdict(TICKET) | {"request": 5},
    ],
)
def test_content_that_no_sign_wrote_is_refused(content):
    assert verify(signed(asdict(TICKET)), SECRET, now=NOW) == TICKET
    with pytest.raises(TicketError, match=r"content|type"):
        verify(signed(content), SECRET, now=NOW)


@pytest.mark.parametrize("field", ["instance", "epoch", "request"])
def test_a_ticket_of_another_process_or_request_is_refused(field):
    TICKET.require(instance="b", epoch="e1", request="r-1")
    with pytest.raises(TicketError, match=f"the ticket is for {field}"):
        replace(TICKET, **{field: "other"}).require(instance="b", epoch="e1", request="r-1")


def test_limits_when_signing():
    assert MAX_TICKET_S >= 60
    with pytest.raises(TicketError, match="shorten its request id"):
        sign(replace(TICKET, request="r" * 1000), SECRET)
    with pytest.raises(ValueError, match="can be guessed"):
        sign(TICKET, b"short")
    with pytest.raises(ValueError, match="can be guessed"):
        verify("v1", b"", now=NOW)


def test_a_prefix_waits_no_longer_than_a_ticket_can_be_valid():
    assert not list(EngineConfig(device_ttl_s=MAX_TICKET_S).problems())
    assert "at most 300 s" in next(EngineConfig(device_ttl_s=MAX_TICKET_S + 1).problems())
