"""A run as one HTML page: numbers, plots and tables, with plotly's own script inlined and nothing fetched.

Text of peers is in it, so every piece of it is escaped where it is put in, plots' labels too: plotly reads some markup
in them. A content security policy keeps the page from loading anything all the same.
"""

import html
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import plotly.graph_objects as go
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from node.report import NodeRun

MOST_POINTS = 2000
"""Of one curve; of a longer run every so many-th step is drawn."""
MAX_TEXT = 300
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#65a30d", "#db2777")
CURVES = (
    ("Reward", "reward", "mean of a step's own samples"),
    ("Tokens per second", "tokens_per_second", "sampled"),
    ("Loss", "loss", "of the update"),
    ("KL to the behaviour policy", "kl_behaviour", "of the update"),
    ("Entropy", "entropy", "nats per token"),
    ("Effective sample size", "ess", "of the importance weights, as a share"),
    ("Clipped tokens", "clip_fraction", "share"),
    ("Gradient norm", "grad_norm", "before clipping"),
    ("Unparsed answers", "unparsed", "share; near 1 the reward parser or the prompt is at fault"),
)
STYLE = """
:root { color-scheme: light; } body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem;
padding: 0 1rem; color: #1f2937; } h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid #e5e7eb; border-radius: 6px; padding: .5rem; } figcaption { color: #6b7280;
font-size: .85rem; } .wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
td, th { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #e5e7eb; vertical-align: top;
overflow-wrap: anywhere; } th { color: #6b7280; font-weight: 600; }
"""
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def text(value: Any) -> str:
    """Anything as HTML text of bounded length, with nothing in it that turns lines around."""
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value)) or "(none)"
    shown = str(value)
    shown = shown if len(shown) <= MAX_TEXT else shown[:MAX_TEXT] + "…"
    return html.escape("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown))


def page(nodes: Sequence[NodeRun]) -> str:
    """The whole page."""
    title = text(f"Shoal: {', '.join(node.name for node in nodes[:8])}")
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    versions = ", ".join(f"{name} {version(name)}" for name in ("shoal", "torch", "transformers", "libp2p"))
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body><h1>{title}</h1>",
            f"<p>Made {made} by {text(versions)}.</p>",
            section("In short", table(SUMMARY, [summary(node) for node in nodes])),
            section("Training", f'<div class="plots">{"".join(plots(nodes))}</div>'),
            section(
                "Settings that are not the default", table(("node", "setting", "value", "default"), changed(nodes))
            ),
            section("Peers", table(PEERS, [row for node in nodes for row in peers(node)])),
            section("Warnings and errors", table(("node", "at", "level", "what", "message"), troubles(nodes))),
            "</body></html>",
        ]
    )


def section(title: str, content: str) -> str:
    return f"<section><h2>{text(title)}</h2>{content}</section>"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return "<p>None.</p>"
    head = "".join(f"<th>{text(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


SUMMARY = (
    "node", "peer id", "swarm", "steps", "reward, first to last tenth", "held-out: first, best, latest",
    "tokens sampled", "own groups", "foreign groups", "hours",
)  # fmt: skip


def summary(node: NodeRun) -> list[Any]:
    steps, scores = node.steps, [evaluation["mean"] for evaluation in node.evaluations]
    if not steps:
        return [node.name, node.peer_id, node.swarm, 0, None, None, 0, 0, 0, None]
    tenth = max(1, len(steps) // 10)
    first, last = mean([s["reward"] for s in steps[:tenth]]), mean([s["reward"] for s in steps[-tenth:]])
    return [
        node.name,
        node.peer_id,
        node.swarm,
        steps[-1]["step"],
        f"{first:.3f} to {last:.3f}",
        f"{scores[0]:.3f}, {max(scores):.3f}, {scores[-1]:.3f}" if scores else None,
        sum(step.get("rollout_tokens", 0) for step in steps),
        sum(step.get("own_groups", 0) for step in steps),
        node.trained_foreign,
        (steps[-1]["at"] - steps[0]["at"]) / 3600,
    ]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def plots(nodes: Sequence[NodeRun]) -> list[str]:
    """All figures that there are numbers for."""
    drawn = [plot("Held-out score", "mean over environments", scores(nodes, lambda e: {"": e["mean"]}), 0)]
    drawn.append(plot("Held-out score by environment", "", scores(nodes, lambda e: e["scores"]), 1))
    for title, key, what in CURVES:
        drawn.append(plot(title, what, curves(nodes, only(key)), len(drawn)))
    by_environment = curves(nodes, lambda step: step.get("rewards", {}))
    drawn.append(plot("Reward by environment", "of a step's own samples", by_environment, len(drawn)))
    groups = curves(nodes, lambda step: {"own": step.get("own_groups"), "foreign": step.get("foreign_groups")})
    drawn.append(plot("Groups of an update", "own, and foreign: what peers tried", groups, len(drawn)))
    seconds = curves(nodes, lambda step: {"rollout": step.get("prepare_seconds"), "update": step.get("update_seconds")})
    drawn.append(plot("Seconds of a step", "until there is a batch, and of the update", seconds, len(drawn)))
    drawn.append(plot("Verdicts on peers' groups", "since the homes were made", verdicts(nodes), len(drawn)))
    return drawn


def only(key: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    return lambda step: {"": step.get(key)}


def curves(nodes: Sequence[NodeRun], values: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> list[go.Scatter]:
    """Lines over steps of what `values` has of a step, by name."""
    return lines(nodes, lambda node: node.steps, values)


def scores(nodes: Sequence[NodeRun], values: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> list[go.Scatter]:
    return lines(nodes, lambda node: node.evaluations, values)


def lines(
    nodes: Sequence[NodeRun],
    records: Callable[[NodeRun], Sequence[Mapping[str, Any]]],
    values: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> list[go.Scatter]:
    found = []
    for i, node in enumerate(nodes):
        taken = records(node)
        taken = taken[:: max(1, len(taken) // MOST_POINTS)]
        names = list(dict.fromkeys(name for record in taken for name in values(record)))
        for j, name in enumerate(names):
            points = [(record["step"], values(record).get(name)) for record in taken]
            points = [(step, value) for step, value in points if isinstance(value, int | float)]
            if not points:
                continue
            parts = [part for part in (node.name if len(nodes) > 1 or not name else "", name) if part]
            found.append(
                go.Scatter(
                    x=[step for step, _ in points],
                    y=[value for _, value in points],
                    name=text(" ".join(parts)),
                    mode="lines" if len(points) > 1 else "markers",
                    line={"width": 1.5, "color": COLOURS[(i + j * len(nodes)) % len(COLOURS)]},
                )
            )
    return found


def verdicts(nodes: Sequence[NodeRun]) -> list[go.Bar]:
    """How often each verdict fell, one bar a node."""
    bars = []
    for i, node in enumerate(nodes):
        counts: dict[str, int] = {}
        for of_peer in node.verdicts.values():
            for verdict, count in of_peer.items():
                if verdict in ("trained", "followed"):  # uses of admitted ones
                    continue
                counts[verdict] = counts.get(verdict, 0) + count
        if counts:
            names = sorted(counts, key=lambda name: -counts[name])
            bars.append(
                go.Bar(
                    x=[text(name) for name in names],
                    y=[counts[name] for name in names],
                    name=text(node.name),
                    marker={"color": COLOURS[i % len(COLOURS)]},
                )
            )
    return bars


def plot(title: str, what: str, traces: Sequence[go.Scatter | go.Bar], number: int) -> str:
    """One figure, or nothing where there is nothing to draw."""
    if not traces:
        return ""
    figure = go.Figure(traces)
    figure.update_layout(
        template="plotly_white",
        height=280,
        margin={"l": 50, "r": 10, "t": 10, "b": 30},
        legend={"orientation": "h", "y": -0.2},
        showlegend=len(traces) > 1,
    )
    drawn = to_html(
        figure,
        full_html=False,
        include_plotlyjs=False,
        div_id=f"plot-{number}",
        default_height="280px",
        config={"displaylogo": False, "responsive": True, "plotlyServerURL": ""},
    )
    return f"<figure><strong>{text(title)}</strong>{drawn}<figcaption>{html.escape(what)}</figcaption></figure>"


def changed(nodes: Sequence[NodeRun]) -> list[tuple[Any, ...]]:
    return [(node.name, key, value, default) for node in nodes for key, (value, default) in node.changed.items()]


PEERS = ("node", "peer", "model", "banned", "announced", "admitted", "refused", "last seen")


def peers(node: NodeRun) -> list[list[Any]]:
    rows = []
    for peer in node.peers:
        counts = dict(node.verdicts.get(peer.peer, {}))
        announced, admitted, *_ = (counts.pop(name, 0) for name in ("announced", "admitted", "trained", "followed"))
        refused = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
        banned = "yes" if peer.banned else "no"
        rows.append([node.name, peer.peer, peer.model, banned, announced, admitted, refused, moment(peer.last_seen)])
    return rows


def troubles(nodes: Sequence[NodeRun]) -> list[tuple[Any, ...]]:
    return [
        (node.name, moment(event["at"]), event["level"], event["kind"], event["message"])
        for node in nodes
        for event in node.events
    ]


def moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
