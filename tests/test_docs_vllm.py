"""What README.md and docs/vllm.md say of the plugin's speed is what the files in benchmarks/results hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
VLLM = "h200x2-vllm-llama-3.1-8b.json"
SHARED = (
    "8b-4-layers",
    "8b-4-layers-fp8",
    "mixtral-8x7b-4-layers",
    "qwen2.5-72b-4-layers",
    "smollm2",
    "smollm2-text",
)  # of h200-shared-vllm-check
WITHOUT_GRAPH = {384: 512, 768: 1024, 896: 1024, 1280: 1536}  # of the sizes measured, and whose graph they ran in


def _in_vllm(phase: str, key: str) -> dict[Any, dict[str, dict[str, Any]]]:
    """Of three engines side by side: size or trace -> configuration -> its row."""
    found: dict[Any, dict[str, dict[str, Any]]] = {}
    for row in json.loads((RESULTS / VLLM).read_text("utf-8"))["rows"]:
        if row["phase"] == phase:
            found.setdefault(row[key], {})[row["configuration"]] = row
    return found


def _words(*path: str) -> str:
    return " ".join(ROOT.joinpath(*path).read_text("utf-8").split())


def test_what_the_readme_says_of_vllm_was_measured():
    readme = _words("README.md")
    prefills = {n: of["tokenweave"] for n, of in _in_vllm("prefill", "tokens").items()}
    over_best = {n: f"{row['speedup_over_best']:.2f}" for n, row in prefills.items()}
    long, short = (sorted(ratio for n, ratio in over_best.items() if (n >= 1536) is large) for large in (True, False))
    assert (
        f"prompts of 1536 tokens and more {long[0]} to {long[-1]} times as fast as in its best configuration" in readme
    )
    assert f"shorter ones {short[0]} to {short[-1]} times" in readme
    traces = {f"{of['tokenweave']['throughput_over_default']:.2f}" for of in _in_vllm("trace", "trace").values()}
    assert len(traces) == 1
    assert f"traces {traces.pop()} times the requests/s of its defaults" in readme


def test_the_tables_of_vllm_hold_its_rows():
    """They are in the result file beside the rows that they were made of."""
    result = json.loads((RESULTS / VLLM).read_text("utf-8"))
    names = ("default", "best", "tokenweave")

    def over(row: dict[str, Any], stock: str, digits: int) -> str:
        key = f"speedup_over_{stock}"
        if key not in row:
            return ""
        value, low, high = (f"{row[key + end]:.{digits}f}" for end in ("", "_low", "_high"))
        return f"{value} ({low}-{high})"

    def row(of: dict[str, dict[str, Any]], digits: int, unit: str, of_ratio: int) -> list[str]:
        ms = [f"{of[name]['ms']:.{digits}f}{unit}" if name in of else "" for name in names]
        return [*ms, *(over(of["tokenweave"], stock, of_ratio) for stock in names[:2])]

    prefills, decodes = _in_vllm("prefill", "tokens"), _in_vllm("decode", "batch")
    tables = {name: table["rows"] for name, table in result["tables"].items()}
    assert tables["vllm-prefill"] == [[n, *row(of, 2, "", 3)] for n, of in prefills.items()]
    assert tables["vllm-decode"] == [[n, *row(of, 2, "", 3)] for n, of in decodes.items()]
    words = {"sharegpt": "ShareGPT", "arxiv_summarization": "arXiv"}
    short = {"default": "defaults", "best": "best", "tokenweave": "plugin"}
    served, every = [], []
    for trace, of in _in_vllm("trace", "trace").items():
        for name, each in of.items():
            waits = [f"{each['ttft_ms'][p] / 1e3:.1f}" for p in ("p50", "p99")]
            waits += [f"{each['tpot_ms'][p]:.1f}" for p in ("p50", "p99")]
            ratios = [each.get(f"throughput_over_{stock}") for stock in names[:2]]
            ratios = ["" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
            served.append([f"{words[trace]}, {short[name]}", f"{each['requests_per_s']:.2f}", *waits, *ratios])
        ratios = [f"{of['tokenweave'][f'throughput_over_{stock}']:.2f}" for stock in names[:2]]
        paces = [f"{of[name]['requests_per_s']:.1f}/s" for name in names]
        every.append([f"{words[trace]}, 500 requests at once", *paces, *ratios])
    assert tables["vllm-traces"] == served
    shown = [int(re.sub(r"\D", "", row[0])) for row in result["table"]["rows"] if row[0].startswith("prefill")]
    assert {192, 384, 768, 1280} < set(shown), "losses are shown too"
    before = [[f"prefill of {n} tokens", *row(prefills[n], 1, " ms", 2)] for n in shown]
    before += [[f"{n} requests decode, a token", *row(decodes[n], 2, " ms", 2)] for n in (32, 256)]
    assert result["table"]["rows"] == before + every


def _measured_in_vllm() -> str:
    """docs/vllm.md, "Measured"."""
    text = _words("docs", "vllm.md")
    return text[text.index("### Measured") : text.index("### The veto")]


def _counted(line: str) -> tuple[int, int]:
    """(steps of the plugin, of them replays) of its line of steps."""
    steps = sum(int(n) for n in re.findall(r"(?:fused|woven) (\d+) steps", line))
    (replays,) = re.findall(r"\((\d+) as graphs\)", line)
    return steps, int(replays)


def test_what_the_plugin_loses_in_vllm_is_said():
    text = _measured_in_vllm()
    result = json.loads((RESULTS / VLLM).read_text("utf-8"))
    clocks = {phase["phase"]: phase for phase in result["clocks"]}
    power, trace_power = (100 * clocks[phase]["limits"]["power"] for phase in ("prefills", "traces"))
    mhz, trace_mhz = (clocks[phase]["sm_mhz"]["median"] for phase in ("prefills", "traces"))
    assert f"in {power:.0f} % of the samples of the prefills (median {mhz:.0f} MHz)" in text
    assert f"and in {trace_power:.0f} % of those of the traces ({trace_mhz:.0f} MHz)" in text

    plugin = {n: of["tokenweave"] for n, of in _in_vllm("prefill", "tokens").items()}
    over_best = {n: row["speedup_over_best"] for n, row in plugin.items()}
    said = ", ".join(f"{over_best[n]:.2f}" for n in list(WITHOUT_GRAPH)[:-1])
    assert f"384, 768, 896 and 1280 tokens ran at {said} and {over_best[1280]:.2f} of the best" in text
    ms = [f"{plugin[n]['ms']:.1f}" for n in (384, 512, 768, 896, 1024, 1280, 1536)]
    assert "({} ms against {}, {} and {} against {}, {} against {})".format(*ms) in text
    assert all(row["speedup_over_best_high"] < 1 for n, row in plugin.items() if n in WITHOUT_GRAPH)
    short = {n: over_best[n] for n in over_best if n <= 256}
    assert list(short) == [16, 32, 64, 128, 192, 256]
    said = f"16 to 256 tokens ran at {min(short.values()):.2f} to {max(short.values()):.2f} of it, 512 at {over_best[512]:.2f}"
    assert said in text
    assert [n for n in (*short, 512) if plugin[n]["speedup_over_best_high"] < 1] == [32, 128, 192, 512]
    rest = {n: over_best[n] for n in over_best if n > 512 and n not in WITHOUT_GRAPH}
    assert f"All other sizes gained, {min(rest.values()):.2f} to {max(rest.values()):.2f} times" in text
    assert f"of 1024 tokens the interval begins at {plugin[1024]['speedup_over_best_low']:.2f}" in text
    assert all(plugin[n]["speedup_over_best_low"] > 1.01 for n in rest if n != 1024)

    decoding = {n: of["tokenweave"] for n, of in _in_vllm("decode", "batch").items()}
    assert max(abs(row["speedup_over_default"] - 1) for n, row in decoding.items() if n <= 64) <= 0.002
    value, low, high = (f"{decoding[256][f'speedup_over_default{end}']:.2f}" for end in ("", "_low", "_high"))
    assert f"256 at {value} ({low} to {high}), by three" in text
    assert decoding[256]["samples"] == 3

    engines = {engine["configuration"]: engine for engine in result["engines"]}
    traces = {name: of["tokenweave"] for name, of in _in_vllm("trace", "trace").items()}
    arxiv, sharegpt = (
        [f"{traces[name][f'throughput_over_{stock}']:.2f}" for stock in ("default", "best")]
        for name in ("arxiv_summarization", "sharegpt")
    )
    assert "ShareGPT {} over the defaults and {} over the best configuration".format(*sharegpt) in text
    assert (
        f"takes {engines['best']['max_num_seqs']} requests a step, so that the others wait; arXiv {' and '.join(arxiv)}"
        in text
    )
    counts = []
    for name in ("sharegpt", "arxiv_summarization"):
        counters = traces[name]["plugin"]
        ours = [counters[f"steps mode={mode}"] for mode in ("fused", "woven")]
        assert [counters[f"graph_replays mode={mode}"] for mode in ("fused", "woven")] == ours
        counts += [sum(ours), counters["fallbacks reason=new_bucket"]]
    assert "Of ShareGPT's steps {} ran fused or woven, all of them replays, and {} as stock".format(*counts[:2]) in text
    assert "of arXiv's {}, all replays, and {}.".format(*counts[2:]) in text
    before = [line for line in engines["tokenweave"]["said"] if "steps by mode: fused" in line][1]  # as traces began
    assert "new_bucket" not in before
    steps, replays = _counted(before)
    assert steps == replays
    assert f"Before the traces all {steps} fused and woven steps were replays too" in text

    (line,) = (line for line in engines["tokenweave"]["said"] if "step graphs, made in" in line)
    assert (
        "{} graphs were made in {} s of the start".format(
            *re.findall(r"([0-9]+) step graphs, made in ([0-9.]+) s", line)[0]
        )
        in text
    )
    took = {name: engine["init_engine_s"] for name, engine in engines.items()}
    said = "{default:.1f} s in the defaults, {best:.1f} s in the best configuration and {tokenweave:.1f} s with".format(
        **took
    )
    assert said in text
    assert f"{took['tokenweave'] - took['default']:.1f} s more than the defaults" in text
    starts = [engines[name]["start_s"] for name in ("tokenweave", "default")]
    assert "it was {:.0f} s in place of {:.0f}".format(*starts) in text
    tables = {engine["variables"]["TOKENWEAVE_PROFILE"] for engine in result["engines"]}
    assert tables == {"benchmarks/results/h200x2-tune-llama-3.1-8b.json"}


def test_where_the_time_of_a_request_in_vllm_goes_is_measured():
    text = _measured_in_vllm()
    result = json.loads((RESULTS / VLLM).read_text("utf-8"))
    prefills = _in_vllm("prefill", "tokens")
    (engine,) = (engine for engine in result["engines"] if engine["configuration"] == "tokenweave")
    (line,) = (line for line in engine["said"] if "ms of a step:" in line)
    layers = {
        int(rows): {mode: float(ms) for ms, mode in re.findall(r"([\d.]+) (stock|fused|woven)", times)}
        for rows, times in re.findall(r"(\d+) rows: ([^;]+)", line)
    }
    took, of_layers = prefills[1024]["tokenweave"]["ms"], layers[1024]["woven"]
    assert of_layers == min(layers[1024].values())
    assert f"Of the {took:.1f} ms of a request of 1024 tokens {of_layers:.1f} are its layers" in text
    assert f"The other {took - of_layers:.1f} are outside" in text
    more = {
        n: (
            prefills[n]["default"]["ms"] - layers[n]["stock"],
            prefills[n]["tokenweave"]["ms"] - min(layers[n][mode] for mode in ("fused", "woven")),
        )
        for n in (512, 8192)
    }
    assert "512 tokens took {:.1f} ms more than their layers in the defaults and {:.1f} with".format(*more[512]) in text
    assert "8192 tokens {:.1f} and {:.1f}. So".format(*more[8192]) in text

    launched = [of["default"]["ms"] for n, of in prefills.items() if 512 < n <= 2048]
    pieces = [of["default"]["ms"] for n, of in prefills.items() if n <= 512]
    assert f"kernel by kernel: {min(launched):.0f} to {max(launched):.0f} ms" in text
    assert f"one by one: {min(pieces):.0f} to {max(pieces):.0f} ms at any size" in text

    other = json.loads((RESULTS / "h200x2-vllm-check-llama-3.1-8b.json").read_text("utf-8"))
    start, requests = other["step_ms_at_start"]["2048"], other["latency"]["2048"]
    assert f"({layers[2048]['woven']:.2f} ms, fused {layers[2048]['fused']:.2f})" in text
    assert f"fused ones ({start['fused']:.2f}, woven {start['woven']:.2f})" in text
    assert f"took {requests['fused']['ms']:.1f} ms fused and {requests['woven']['ms']:.1f} woven" in text


def test_how_far_the_plugins_tokens_are_from_vllms_is_said():
    text = _measured_in_vllm()
    modes = ("stock", "fused", "woven")
    for file, said in (
        ("llama-3.1-8b", "{} % of the greedy tokens were equal between two runs of stock"),
        ("llama-3.1-8b", "{1} % between stock and fused, and {2} % between stock and woven"),
        ("8-layers", "{} %, {} % and {} % of the tokens were equal"),
    ):
        layouts = json.loads((RESULTS / f"h200x2-vllm-check-{file}.json").read_text("utf-8"))["layouts"]
        assert said.format(*(f"{100 * layouts[mode]['equal_tokens']:.0f}" for mode in modes)) in text
        far = [f"{layouts[mode]['largest_logprob_difference']:.2f}" for mode in modes]
        assert "differed by up to {}, {} and {}.".format(*far) in text


def test_what_is_said_of_ranks_that_share_a_gpu():
    text = _measured_in_vllm()
    results = {
        name: json.loads((RESULTS / f"h200-shared-vllm-check-{name}.json").read_text("utf-8")) for name in SHARED
    }
    modes = ("stock", "fused", "woven")
    for name, equal, ties in (
        (
            "smollm2",
            "{} % of the tokens were equal between two runs of stock, {} % between stock and fused and {} % between",
            "preferred its own token by at most {:.2f}, {:.2f} and {:.2f}",
        ),
        ("8b-4-layers", "{} %, {} % and {} % were equal", "the ties at most {:.2f} in each"),
    ):
        layouts = results[name]["layouts"]
        broken = [layouts[mode]["largest_tie_broken"] for mode in modes]
        assert equal.format(*(f"{100 * layouts[mode]['equal_tokens']:.0f}" for mode in modes)) in text
        assert ties.format(*broken) in text
        assert max(broken) == broken[0], "no larger than stock's own"
        assert results[name]["state"]["reasons"]["prefix_hazard"] == 1
        assert results[name]["environment"]["sms"] == 66
        assert "step_ms_at_start" not in results[name]
    layouts = results["smollm2-text"]["layouts"]
    equal = "{} % of the tokens were equal between two runs of stock, {} % between stock and fused and {} % between"
    assert equal.format(*(f"{100 * layouts[mode]['equal_tokens']:.0f}" for mode in modes)) in text
    assert {layouts[mode]["largest_tie_broken"] for mode in modes} == {0.25}
    layouts = results["8b-4-layers-fp8"]["layouts"]
    assert "apart: {} %, {} % and {} %.".format(*(f"{100 * layouts[m]['equal_tokens']:.0f}" for m in modes)) in text
    assert f"differed by up to {layouts['woven']['largest_logprob_difference']:.2f}, ten times" in text
    broken = [layouts[mode]["largest_tie_broken"] for mode in modes]
    assert broken[0] is None
    assert "at most {:.2f} and {:.2f}".format(*broken[1:]) in text
    for name, said in (
        ("qwen2.5-72b-4-layers", "{:.0f} %, {:.0f} % and {:.0f} % of the tokens were equal, log-probabilities"),
        ("mixtral-8x7b-4-layers", "it was {:.0f} %, {:.0f} % and {:.0f} %, and log-probabilities"),
    ):
        layouts = results[name]["layouts"]
        assert said.format(*(100 * layouts[mode]["equal_tokens"] for mode in modes)) in text
        far = max(layouts[mode]["largest_logprob_difference"] for mode in modes)
        assert f"differed by up to {far:.2f} " in text
        assert results[name]["environment"]["sms"] == 66
        assert "step_ms_at_start" not in results[name]
    broken = [results["qwen2.5-72b-4-layers"]["layouts"][mode]["largest_tie_broken"] for mode in modes]
    assert f"up to {max(broken):.2f} and no broken tie was larger" in text
    turns = [results["smollm2"][f"requests_{turn}"] for turn in range(2)]
    # A step with a hazard is counted as fused, too.
    steps = [sum(turn["modes"].values()) + sum(turn["reasons"].values()) - 1 for turn in turns]
    assert {turn["count"] for turn in turns} == {500}
    assert f"twice: {steps[1] - steps[0]:,} steps the second time, some {round(steps[1], -2):,} with all" in text
    (allocated,) = {turn["allocated_gib"] for turn in turns}
    assert f"and {allocated} GiB allocated after either" in text
