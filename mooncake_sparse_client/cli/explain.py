"""``explain``: which chunks a put keeps and why, and which a hit loads, in words and as a picture."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from ..checks import whole_number
from ..config import Retention, load_retention
from ..core.layout import KVCacheLayout
from ..core.masks import check_retention_interval, load_mask
from ..core.plans import PutPlan, plan_put
from ..core.presets import PRESETS, layout_for
from ..core.tally import Tally
from ..errors import ConfigError
from .arguments import interval_of, naming, write_figures
from .image import check_image, draw
from .picture import Picture, Section, boundaries_of, label_of, load_section, put_section
from .sketch import shades_for, sketch
from .table import print_table, tally_cells

#: So many chunks still draw in seconds.
_MOST_TOKENS: Final = 1 << 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", choices=sorted(PRESETS), default="deepseek-v4", help="default: %(default)s")
    parser.add_argument(
        "--tokens", type=int, default=4096, metavar="N", help="length of the sequence; default: %(default)s"
    )
    parser.add_argument(
        "--retention-interval",
        metavar="N",
        help="in tokens, or 'none' to keep every boundary; default: what the environment sets, as for a client",
    )
    parser.add_argument("--num-prompt-tokens", type=int, metavar="N", help="length of the prompt; default: --tokens")
    parser.add_argument("--start-token", type=int, default=0, metavar="N", help="where the put begins; default: 0")
    parser.add_argument(
        "--boundary",
        type=int,
        action="append",
        default=[],
        metavar="T",
        help="a position at which later requests part; may be repeated",
    )
    parser.add_argument("--load", type=int, metavar="HIT", help="draw what a hit of so many tokens loads, too")
    parser.add_argument(
        "--local-tokens", type=int, default=0, metavar="N", help="of --load: a prefix that the engine holds; default: 0"
    )
    parser.add_argument("--image", type=Path, metavar="FILE", help="draw to this .png or .svg file too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")


def run(arguments: argparse.Namespace) -> int:
    """Explain; 0 unless an error is raised."""
    if arguments.image is not None:
        check_image(arguments.image)
    layout = layout_for(arguments.layout)
    plan = _plan(arguments, layout)
    told = plan.explain()
    load = _load(arguments, layout, plan.end_token)
    sections = [put_section(plan), *([] if load is None else [load.section(layout, plan.end_token)])]
    picture = Picture(
        title=f"{arguments.layout}: which chunks are worth storing",
        alignment=layout.alignment,
        end_token=plan.end_token,
        sections=sections,
        boundaries=boundaries_of(plan),
    )
    if arguments.image is not None:
        draw(picture, arguments.image)
    if arguments.json is not None:
        figures = {
            "layout": arguments.layout,
            "tokens": arguments.tokens,
            "put": told.as_json(),
            "load": None if load is None else load.figures(layout),
        }
        write_figures(arguments.json, json.dumps(figures, indent=2) + "\n")
    blocks = ", ".join(str(spec.block_size) for spec in layout.groups)
    print(f"layout {arguments.layout}: blocks of {blocks} tokens; boundaries are multiples of {layout.alignment}\n")
    print(f"{told}\n")
    if load is not None:
        load.show(layout)
    shades = shades_for(getattr(sys.stdout, "encoding", None))
    print("\n".join(sketch(picture, shutil.get_terminal_size().columns, shades)))
    return 0


@dataclass(frozen=True, slots=True)
class _Load:
    """A hit, and what the engine holds of it; both in tokens and aligned."""

    hit_length: int
    local_tokens: int

    def section(self, layout: KVCacheLayout, end_token: int) -> Section:
        return load_section(layout, end_token, self.hit_length, self.local_tokens)

    def tallies(self, layout: KVCacheLayout) -> list[Tally]:
        masks = load_mask(layout, self.hit_length, local_tokens=self.local_tokens)
        pairs = zip(masks, layout.page_sizes, strict=True)
        return [Tally.of(int(np.count_nonzero(mask)), page) for mask, page in pairs]

    def figures(self, layout: KVCacheLayout) -> dict[str, object]:
        """Plain values, ready for JSON."""
        return {
            "hit_length": self.hit_length,
            "local_tokens": self.local_tokens,
            "groups": [
                {"group": number, "loaded": tally.figures()} for number, tally in enumerate(self.tallies(layout))
            ],
        }

    def show(self, layout: KVCacheLayout) -> None:
        """Print the table."""
        print(f"a hit of {self.hit_length} tokens, {self.local_tokens} of them held by the engine, loads\n")
        rows = zip(layout.groups, self.tallies(layout), strict=True)
        print_table(
            ["group", "chunks", "bytes"],
            [[label_of(number, spec), *tally_cells(tally)] for number, (spec, tally) in enumerate(rows)],
        )


def _load(arguments: argparse.Namespace, layout: KVCacheLayout, end_token: int) -> _Load | None:
    """The hit that the arguments speak of. Raises ``ConfigError``."""
    local = layout.align(whole_number(arguments.local_tokens, "--local-tokens", ConfigError))
    if arguments.load is None:
        if arguments.local_tokens:
            raise ConfigError("--local-tokens says what the engine holds of a hit: name the hit with --load")
        return None
    hit = whole_number(arguments.load, "--load", ConfigError)
    if hit % layout.alignment or hit > end_token:
        raise ConfigError(
            f"--load must be a multiple of the alignment {layout.alignment} and at most {end_token}, not {hit}"
        )
    return _Load(hit, min(local, hit))


def _plan(arguments: argparse.Namespace, layout: KVCacheLayout) -> PutPlan:
    """The plan of the put that the arguments speak of. Raises ``ConfigError`` that names the one at fault."""
    tokens = whole_number(arguments.tokens, "--tokens", ConfigError)
    if not layout.alignment <= tokens <= _MOST_TOKENS:
        raise ConfigError(
            f"--tokens must be from {layout.alignment}, the layout's alignment, to {_MOST_TOKENS}, not {tokens}"
        )
    prompt = tokens if arguments.num_prompt_tokens is None else arguments.num_prompt_tokens
    retention = _retention(arguments.retention_interval)
    with naming(retention.origin):
        check_retention_interval(layout, retention.interval)
    prompt = whole_number(prompt, "--num-prompt-tokens", ConfigError)
    boundaries = [whole_number(position, "--boundary", ConfigError) for position in arguments.boundary]
    start = whole_number(arguments.start_token, "--start-token", ConfigError)
    with naming("--start-token"):
        return plan_put(
            layout,
            tokens,
            num_prompt_tokens=prompt,
            start_token=start,
            boundaries=boundaries,
            retention_interval=retention.interval,
            retention_origin=retention.origin,
        )


def _retention(text: str | None) -> Retention:
    if text is None:
        return load_retention()
    with naming("--retention-interval"):
        return Retention(interval_of(text), "--retention-interval")
