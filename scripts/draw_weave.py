"""Draws docs/weave.svg: the same stages walked sequentially, fused and woven, as two streams over time.

Nothing is placed by hand. ``run_stages`` itself walks a stage list whose compute and collectives only take time, on two
virtual in-order streams; the times are what the planner predicts for the step named in the picture.

    python scripts/draw_weave.py [--out docs/weave.svg]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch

from tokenweave import Epilogue, Mode, Split, Stage, Workspace, run_stages
from tokenweave.models import read_config
from tokenweave.planning import Planner
from tokenweave.planning.batch import Batch, Run

MODEL, GPU, RANKS, TOKENS = "Llama-3.1-8B", "h200", 4, 4096
LAYERS = 2  # drawn, of the model's
HIDDEN = 8  # of the rows that the walk moves; times are the model's


@dataclass(frozen=True)
class Box:
    """One piece of work: on ``stream`` ("compute" or "communication") from ``start`` to ``end``, in us."""

    stream: str
    name: str
    split: int
    start: float
    end: float


@dataclass
class Clock:
    """Two in-order streams of virtual time, as an overlap backend; compute is charged by the stages."""

    collective_us: Callable[[int], float]  # rows -> us
    boxes: list[Box] = field(default_factory=list)
    compute: float = 0.0
    communication: float = 0.0

    def charge(self, name: str, split: int, alone: float, beside: float) -> None:
        """Work on the compute stream, which takes ``alone`` us, or ``beside`` while collectives run."""
        overlap = min(max(0.0, self.communication - self.compute), beside)
        us = overlap + (1 - overlap / beside) * alone
        self.boxes.append(Box("compute", name, split, self.compute, self.compute + us))
        self.compute += us

    def run(self, collective: Callable[..., torch.Tensor], *args: Any) -> tuple[float, torch.Tensor]:
        """A collective starts when the communication stream is free and all compute issued so far is done."""
        done = self.boxes[-1]
        start = max(self.communication, self.compute)
        self.communication = start + self.collective_us(args[0].shape[0])
        self.boxes.append(Box("communication", done.name, done.split, start, self.communication))
        return self.communication, collective(*args)

    def wait(self, pending: tuple[float, torch.Tensor]) -> torch.Tensor:
        """The compute stream waits for a collective."""
        self.compute = max(self.compute, pending[0])
        return pending[1]

    def close(self) -> None:
        pass


def timeline(mode: Mode) -> tuple[list[Box], float]:
    """(work in the order it was issued, end in us) of the first LAYERS layers in this mode."""
    planner = Planner(read_config(MODEL), GPU, RANKS, "p2p", "auto")
    model, plan = planner.model, planner.plan(TOKENS, mode=mode)
    batch = Batch((Run(TOKENS, 0, True),))
    ends = [plan.split or TOKENS, TOKENS] if plan.split else [TOKENS]
    starts = [0, *ends[:-1]]
    held = model.held(plan.ctas) if mode is Mode.WOVEN else 0

    def collective_us(rows: int) -> float:
        if mode is Mode.SEQUENTIAL:
            return model.sequential_us(rows)
        return float(model.fused_us(rows, plan.ctas))

    clock = Clock(collective_us)

    def compute(kind: str, name: str) -> Callable[[torch.Tensor | None, Any, torch.Tensor], None]:
        def run(x: torch.Tensor | None, inputs: Any, out: torch.Tensor) -> None:
            before, after = batch.attention(starts[inputs]), batch.attention(ends[inputs])
            work = (after[0] - before[0], after[1] - before[1])
            attention, mlp = model.stage_us(ends[inputs] - starts[inputs], work, held)
            embedding = (2 * model.gpu.kernel_us,) * 2
            # Collectives start at once here: run_stages is given no points to wait for.
            alone, beside = {"embedding": embedding, "attention": attention[:2], "mlp": mlp[:2]}[kind]
            clock.charge(name, inputs, float(alone), float(beside))

        return run

    def stages() -> Iterator[Stage]:
        weight = torch.ones(HIDDEN)
        yield Stage("embedding", compute("embedding", "embedding"), Epilogue(weight, 1e-5, has_residual=False))
        for layer in range(LAYERS):
            for kind in ("attention", "mlp"):
                yield Stage(f"{kind}_{layer}", compute(kind, f"{kind} {layer}"), Epilogue(weight, 1e-5))

    residual = torch.zeros(TOKENS, HIDDEN)
    splits = [Split(s, e - s, i, residual[s:e]) for i, (s, e) in enumerate(zip(starts, ends, strict=True))]
    with Workspace(None, max_tokens=TOKENS, hidden=HIDDEN, dtype=torch.float32) as workspace:
        run_stages(list(stages()), splits, lambda partial, residual, epilogue, rows: partial, workspace, clock)
    return clock.boxes, clock.communication


# The drawing ------------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, TOP, LANE, GAP, PANEL = 1240, 130, 90, 96, 34, 6, 142
INK, MUTED, GRID, IDLE = "#1f2933", "#5f6b7a", "#e4e8ee", "#f3f5f8"
COLOURS = {  # split -> (compute, collective); readable with every kind of colour vision
    None: ("#4b5d73", "#a9b7c8"),
    0: ("#1d6fb8", "#9ccbf0"),
    1: ("#d9730d", "#f8c99a"),
}
TITLES = {
    Mode.SEQUENTIAL: ("Sequential", "all-reduce, residual add and RMSNorm on every rank, one after the other"),
    Mode.FUSED: ("Fused", "one collective: reduce-scatter, residual add, RMSNorm of the owned rows, all-gather"),
    Mode.WOVEN: ("Woven", "two splits: the collective of one runs beside the compute of the other"),
}


def draw() -> str:
    """The picture as SVG text."""
    walks = {mode: timeline(mode) for mode in Mode}
    longest = max(end for _, end in walks.values())
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = TOP + len(walks) * PANEL + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="Helvetica, Arial, sans-serif">',
        "<title>Sequential, fused and woven execution of the same stages on two streams</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff"/>',
        _text(24, 34, "One step, three ways to walk the same stages", 19, INK, weight="bold"),
        *_legend(24, 62),
    ]
    bottom = TOP + len(walks) * PANEL
    for us in range(0, int(longest) + 1, 250):
        x = LEFT + us * scale
        parts.append(f'<path d="M{x:.1f} {TOP - 4} V{bottom - 8}" stroke="{GRID}"/>')
        parts.append(_text(x, bottom + 8, f"{us} µs" if us else "0", 11, MUTED, "middle"))
    for number, (mode, (boxes, end)) in enumerate(walks.items()):
        parts += _panel(mode, boxes, end, walks[Mode.SEQUENTIAL][1], TOP + number * PANEL, scale)
    caption = (
        f"Order: recorded from run_stages. Times: predicted by the planner for {LAYERS} of the layers of {MODEL}, "
        f"{TOKENS} tokens, {RANKS} H200, NVLink without multicast."
    )
    parts += [_text(24, height - 18, caption, 12, MUTED), "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(mode: Mode, boxes: list[Box], end: float, slowest: float, top: float, scale: float) -> Iterator[str]:
    title, subtitle = TITLES[mode]
    woven = mode is Mode.WOVEN
    yield _text(24, top + 14, title, 15, INK, weight="bold")
    yield _text(LEFT, top + 14, subtitle, 12.5, MUTED)
    lanes = {"compute": top + 38, "communication": top + 38 + LANE + GAP}
    for stream, y in lanes.items():
        yield _text(LEFT - 10, y + LANE / 2 + 4, stream, 12, MUTED, "end")
        yield f'<rect x="{LEFT}" y="{y}" width="{end * scale:.1f}" height="{LANE}" fill="{IDLE}"/>'
    for box in boxes:
        compute = box.stream == "compute"
        fill = COLOURS[box.split if woven else None][0 if compute else 1]
        x, width = LEFT + box.start * scale, (box.end - box.start) * scale
        split = ("prefix", "suffix")[box.split] + " " if woven else ""
        yield (
            f'<rect x="{x:.1f}" y="{lanes[box.stream]}" width="{width:.1f}" height="{LANE}" rx="3" fill="{fill}" '
            f'stroke="#ffffff"><title>{escape(f"{split}{box.name}, {box.stream}")}: '
            f"{box.start:.0f} to {box.end:.0f} µs</title></rect>"
        )
        labels = [box.name, box.name.replace("attention", "attn")] if compute else ["comm"]
        label = next((label for label in labels if width > 6.2 * len(label) + 4), None)
        if label:
            yield _text(
                x + width / 2, lanes[box.stream] + LANE / 2 + 4, label, 11.5, "#ffffff" if compute else INK, "middle"
            )
    x = LEFT + end * scale
    yield f'<path d="M{x:.1f} {lanes["compute"] - 4} v{2 * LANE + GAP + 8}" stroke="{INK}" stroke-width="1.5"/>'
    middle = lanes["communication"] - GAP / 2
    yield _text(x + 8, middle - 3, f"{end:.0f} µs", 13, INK, weight="bold")
    if end != slowest:
        yield _text(x + 8, middle + 14, f"{end / slowest - 1:+.0%}".replace("-", "−"), 13, INK)
    if woven:
        yield from _cache_arrow(boxes, lanes["compute"], scale)


def _cache_arrow(boxes: list[Box], y: float, scale: float) -> Iterator[str]:
    """From the prefix's first attention to the suffix's, which reads the K/V it has just written."""
    prefix, suffix = (next(b for b in boxes if b.name == "attention 0" and b.split == split) for split in (0, 1))
    a, b = (LEFT + (box.start + box.end) / 2 * scale for box in (prefix, suffix))
    yield (
        f'<path d="M{a:.1f} {y - 1} C{a:.1f} {y - 19} {b:.1f} {y - 19} {b:.1f} {y - 2}" fill="none" '
        f'stroke="{INK}" stroke-width="1.3" marker-end="url(#tip)"><title>K/V</title></path>'
    )


def _legend(x: float, y: float) -> Iterator[str]:
    entries = [
        (COLOURS[None], "whole step"),
        (COLOURS[0], "prefix"),
        (COLOURS[1], "suffix"),
    ]
    for (compute, collective), name in entries:
        yield f'<rect x="{x}" y="{y - 10}" width="14" height="12" fill="{compute}"/>'
        yield f'<rect x="{x + 14}" y="{y - 10}" width="14" height="12" fill="{collective}"/>'
        yield _text(x + 34, y, name, 12.5, INK)
        x += 50 + 7 * len(name)
    yield _text(x + 10, y, "dark: compute · light: collective · grey: stream idle", 12.5, MUTED)
    yield f'<path d="M{x + 330} {y - 2} q15 -16 30 0" fill="none" stroke="{INK}" marker-end="url(#tip)"/>'
    yield _text(x + 370, y, "the suffix's attention reads the K/V that the prefix wrote", 12.5, MUTED)


def _text(x: float, y: float, text: str, size: float, fill: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parent.parent / "docs" / "weave.svg"
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    args.out.write_text(draw(), encoding="utf-8")
    print(args.out)


if __name__ == "__main__":
    main()
