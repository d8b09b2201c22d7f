"""Terminal output of judgements."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from gammaray.cli.output import columns
from gammaray.qualify.judgement import Fitness, Judgement
from gammaray.qualify.measured import ModelFacts, PairFacts, Trial

_COLOURS = {Fitness.FIT: "green", Fitness.SLOWER: "yellow", Fitness.UNFIT: "red"}


def print_pair(console: Console, pair: PairFacts, judgement: Judgement) -> None:
    """Print the measurements of one candidate, and its judgement."""
    lines = [_model("target", pair.target), _model("head" if pair.is_local else "draft", pair.draft)]
    console.print(*lines, sep="\n", soft_wrap=True, markup=False)
    for trial in pair.trials:
        _print_trial(console, trial)
    for warning in judgement.warnings:
        console.print(f"note: {warning}", soft_wrap=True, markup=False)
    console.print(f"[bold {_COLOURS[judgement.fitness]}]{judgement.fitness.value}[/]")
    for reason in judgement.reasons:
        console.print(f"  {reason}", soft_wrap=True, markup=False)
    console.print()


def print_ranking(console: Console, pairs: Sequence[PairFacts], judgements: Sequence[Judgement]) -> None:
    """Print the candidates, the best one first."""
    table = columns("draft", "verdict", "best speedup")
    order = list(Fitness)
    both = zip(pairs, judgements, strict=True)
    for pair, judgement in sorted(both, key=lambda one: (order.index(one[1].fitness), -one[1].best_speedup)):
        speedup = f"{judgement.best_speedup:.2f}x" if judgement.best_speedup else ""
        table.add_row(pair.draft.name, judgement.fitness.value, speedup)
    console.print("Candidates", table, sep="\n")


def _model(role: str, facts: ModelFacts) -> str:
    if facts.refusal or not facts.vocab_size:
        return f"{role} {facts.name}: not run"
    return (
        f"{role} {facts.name}: {facts.vocab_size} token ids, context of {facts.max_context} tokens, "
        f"kernel {facts.kernel}"
    )


def _print_trial(console: Console, trial: Trial) -> None:
    ties = f", {trial.ties} diverge at a tie" if trial.ties else ""
    console.print(
        f"temperature {trial.temperature:g}: {trial.equal} of {trial.compared} completions have the tokens "
        f"of plain decoding{ties} ({trial.tokens} tokens compared)",
        soft_wrap=True,
    )
    if not trial.depths:
        return
    table = columns("gamma", "tokens/cycle", "draft, ms", "verify, ms", "cycle, ms", "speedup")
    table.add_row("0", "1.00", "", f"{trial.plain_ms:.2f}", f"{trial.plain_ms:.2f}", "1.00")
    for depth in trial.depths:
        mark = " <- best" if depth == trial.best and depth.speedup > 1 else ""
        times = (depth.draft_ms, depth.verify_ms, depth.cycle_ms)
        cells = [f"{value:.2f}" for value in (depth.tokens_per_cycle, *times, depth.speedup)]
        table.add_row(str(depth.gamma), *cells[:-1], f"{cells[-1]}{mark}")
    console.print(table)
    both = zip(trial.accepted, trial.tested, strict=True)
    by_position = ", ".join(f"{accepted / tested:.2f}" for accepted, tested in both if tested)
    console.print(
        f"alpha {trial.alpha:.3f} over {sum(trial.tested)} tested tokens; by position: {by_position}\n"
        f"target pass {trial.plain_ms:.2f} ms, draft step {trial.draft_step_ms:.2f} ms\n",
        soft_wrap=True,
    )
