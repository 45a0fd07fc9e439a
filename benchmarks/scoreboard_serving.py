"""Rows of the scoreboard about serving: overload, intake of requests, and the relay."""

from __future__ import annotations

from collections.abc import Iterator

from scoreboard import Row, figure, records


def overload_rows() -> Iterator[Row]:
    for one in records("serve_load")[-1:]:
        found, command, base = one["figures"], "serve_load.py", one["settings"]["before"]
        loads = {"closed": "200 connections with a deadline of 300 ms", "open": "arrivals at three times the capacity"}
        for key, load in loads.items():
            reference = (
                f"limit 0.70x, {base} {found[f'{key}_before']:.2f}x; P99 {found[f'{key}_p99_ms']:.0f} ms, limit 300 ms"
            )
            yield f"useful answers over the capacity at 8 connections, {load}", figure(found, key), reference, command
        low, high = found["refusal_ms_range"]
        reference = f"limit 0.1 ms; {base} {found['refusal_ms_before']:.2f} ms"
        yield "CPU of a refusal", f"{found['refusal_ms']:.3f} ms ({low:.3f}-{high:.3f})", reference, command
        reference = f"{found['intake_ms']:.2f} ms, before {found['intake_ms_before']:.2f} ms; limit 0.50x"
        title = f"CPU of a ranking request outside the model, 128 candidates, short history, over {base}"
        yield title, figure(found, "intake_ratio"), reference, command
        reference = f"{found['answers_per_cpu_s']:.0f}, before {found['answers_per_cpu_s_before']:.0f}; aim 2x"
        yield f"answers per CPU second, the same over {base}", figure(found, "answers_ratio"), reference, command


def relay_rows() -> Iterator[Row]:
    for one in records("relay", lambda settings: settings.get("overload", False))[-1:]:
        found = one["figures"]
        reference = (
            f"useful answers {found['overload_good_over_capacity']:.2f}x of the capacity, limit 0.70x; "
            f"{found['overload_failed']} failed; within budget again after {found['recovered_after_s']:.1f} s"
        )
        title = "P99 of useful answers over the budget at three times the capacity, relay-long"
        yield title, f"{found['overload_ranked_p99_over_budget']:.2f}x", reference, "relay.py --cells overload"
    measured = records("relay", lambda one: one["workload"] == "relay-long" and not (one["overload"] or one["curve"]))
    for one in [one for one in measured if "goodput_ratio" in one["figures"]][-1:]:
        found = one["figures"]
        hits = f"{found['hit_share everything']:.0%} hits; " if "hit_share everything" in found else ""
        no_reuse = "goodput_ratio_no_reuse"
        cpu = [found.get(f"cpu_ms_per_answer {arm}") for arm in ("full", "everything")]
        bound = (
            f"CPU per answer {cpu[0]:.0f} ms in full, {cpu[1]:.0f} ms with the relay, one core; " if all(cpu) else ""
        )
        without = (
            f"{hits}{f'without reuse {figure(found, no_reuse)}; ' if no_reuse in found else ''}{bound}published 3.6x"
        )
        yield (
            "goodput over full inference at the P99 budget, relay-long",
            figure(found, "goodput_ratio"),
            without,
            "relay.py",
        )
    for one in [one for one in measured if "history_ratio" in one["figures"]][-1:]:
        yield (
            "longest history over full inference, relay-long",
            figure(one["figures"], "history_ratio"),
            "published 1.5x",
            "relay.py --cells history-2.0-cold10",
        )
    for one in records("relay", lambda settings: settings.get("workload") == "relay-ml1m")[-1:]:
        found = one["figures"]
        low, high = found["idle_cpu_overhead_range"]
        value = f"{found['idle_cpu_overhead']:+.1%} ({low:+.1%}-{high:+.1%})"
        yield (
            "CPU per answer over full inference, short histories, relay-ml1m",
            value,
            "limit +5 %, aim +3 %",
            "relay.py --cells ml1m",
        )

    for one in records("hit")[-1:]:
        found = one["figures"]
        bound = f"{found['before_ms 4096']:.1f} ms before, its arithmetic at sgemm's rate {found['bound_ms 4096']:.1f} ms; limit 0.6"
        yield (
            "CPU of a cached request over the torch path, 4,096 events",
            figure(found, "hit_cpu_vs_before"),
            bound,
            "hit.py",
        )
    for one in records("history_quality")[-1:]:
        found = one["figures"]
        lengths = [name.removeprefix("auc ") for name in found if name.startswith("auc ")]
        values = ", ".join(f"{length}: {found[f'auc {length}']:.3f}" for length in lengths)
        title = "AUC by events served, where long histories matter"
        yield title, f"+{found['auc_longest_minus_shortest']:.3f}", values, "history_quality.py"
