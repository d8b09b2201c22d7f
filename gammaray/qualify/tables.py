"""Terminal output of judgements."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from gammaray.qualify.judgement import Fitness, Judgement, Payoff
from gammaray.qualify.measured import Equality, ModelFacts, PairFacts

_COLOURS = {Fitness.FIT: "green", Fitness.SLOWER: "yellow", Fitness.UNFIT: "red"}


def print_pair(console: Console, pair: PairFacts, judgement: Judgement) -> None:
    """Print the measurements of one candidate, and its judgement."""
    console.print(_model("target", pair.target), soft_wrap=True, markup=False)
    console.print(_model("head" if pair.is_local else "draft", pair.draft), soft_wrap=True, markup=False)
    for equality in pair.equality:
        console.print(_lossless(equality), soft_wrap=True)
    for payoff in judgement.payoffs:
        console.print(_gains(payoff))
        for line in _lines(payoff):
            console.print(line, soft_wrap=True)
    for warning in judgement.warnings:
        console.print(f"note: {warning}", soft_wrap=True, markup=False)
    colour = _COLOURS[judgement.fitness]
    console.print(f"[bold {colour}]{judgement.fitness.value}[/]")
    for reason in judgement.reasons:
        console.print(f"  {reason}", soft_wrap=True, markup=False)
    console.print()


def print_ranking(console: Console, pairs: Sequence[PairFacts], judgements: Sequence[Judgement]) -> None:
    """Print the candidates, the best one first."""
    table = _table("Candidates", "draft", "verdict", "best speedup")
    order = list(Fitness)
    both = zip(pairs, judgements, strict=True)
    for pair, judgement in sorted(both, key=lambda one: (order.index(one[1].fitness), -one[1].best_speedup)):
        speedup = f"{judgement.best_speedup:.2f}x" if judgement.payoffs else ""
        table.add_row(pair.draft.name, judgement.fitness.value, speedup)
    console.print(table)


def _model(role: str, facts: ModelFacts) -> str:
    served = f"runs in {facts.dtype} on {facts.device}" if facts.device else "not run"
    return (
        f"{role} {facts.name}: {facts.architecture or 'unknown architecture'}, "
        f"{facts.vocab_size or 'unknown'} token ids, "
        f"context of {facts.max_context or 'unknown'} tokens, {served}"
    )


def _gains(payoff: Payoff) -> Table:
    table = _table(
        f"temperature {payoff.temperature:g}",
        *("gamma", "tokens/cycle", "draft, ms", "verify, ms", "cycle, ms", "speedup"),
    )
    table.add_row("0", "1.00", "", f"{payoff.plain_ms:.2f}", f"{payoff.plain_ms:.2f}", "1.00")
    for depth in payoff.depths:
        mark = " <- best" if depth == payoff.best and depth.speedup > 1 else ""
        table.add_row(
            str(depth.gamma),
            f"{depth.tokens_per_cycle:.2f}",
            f"{depth.draft_ms:.2f}",
            f"{depth.verify_ms:.2f}",
            f"{depth.cycle_ms:.2f}",
            f"{depth.speedup:.2f}{mark}",
        )
    return table


def _lines(payoff: Payoff) -> list[str]:
    by_position = ", ".join(f"{alpha:.2f}" for alpha in payoff.by_position)
    return [
        f"alpha {payoff.alpha:.3f} over {payoff.tested} tested tokens; by position: {by_position}",
        f"target pass {payoff.plain_ms:.2f} ms, draft step {payoff.draft_step_ms:.2f} ms",
        "",
    ]


def _lossless(equality: Equality) -> str:
    ties = f", {equality.ties} diverge at a tie" if equality.ties else ""
    same = f"{equality.equal} of {equality.compared} completions have the tokens of plain decoding{ties}"
    tokens = f" ({equality.tokens} tokens compared)" if equality.tokens else ""
    return f"temperature {equality.temperature:g}: {same}{tokens}"


def _table(title: str, *headings: str) -> Table:
    return Table(*headings, title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
