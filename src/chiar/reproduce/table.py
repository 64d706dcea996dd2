"""The table: ours beside the paper's, under a caption that says what was done differently."""

import json
import math
from typing import TYPE_CHECKING, Any

from chiar.evaluation.report import exponential, finite, perplexity, shown
from chiar.reproduce.plan import Plan
from chiar.training.run_folder import command_line, versions

if TYPE_CHECKING:
    from rich.table import Table

    from chiar.reproduce.procedure import Result

FORMAT = "chiar-reproduction/1"
COLUMNS = (
    "model", "parameters", "val PPL", "paper", "test PPL", "paper", "test loss", "gap, nats", "paper",
    "MFLOPs/token", "÷ baseline", "τ", "f", "g", "train tokens/s",
)  # fmt: skip


def numbers(plan: Plan, results: "list[Result]") -> list[dict[str, Any]]:
    """One record a finished row; gaps are to the first row, in nats."""
    base, paper_base = results[0].test, plan.recipe.rows[0].paper_test
    records: list[dict[str, Any]] = []
    for result in results:
        row, test, routing = result.planned.row, result.test, result.test.routing
        record: dict[str, Any] = {
            "name": row.name,
            "title": row.title,
            "preset": result.planned.preset,
            "parameters": result.parameters,
            "validation_loss": result.validation.scores.loss,
            "validation_perplexity": finite(exponential(result.validation.scores.loss)),
            "best_step": result.best_step,
            "test_loss": test.scores.loss,
            "test_perplexity": finite(exponential(test.scores.loss)),
            "gap": test.scores.loss - base.scores.loss,
            "paper": {
                "validation_perplexity": row.paper_validation,
                "test_perplexity": row.paper_test,
                "gap": math.log(row.paper_test / paper_base),
            },
            "flops_per_token": test.flops,
            "flops_of_baseline": test.flops / base.flops,
            "threshold": result.tau,
            "attention_fraction": routing.fraction,
            "gate": routing.gate,
            "gate_pool": routing.gate_pool,
            "gate_by_corpus_in_training": result.gates,
            "tokens_per_second": result.tokens_per_second,
            "device": test.device,
            "command": result.command,
            "run": result.run,
        }
        beside = next((other for other in records if other["name"] == row.beside), None)
        if beside is not None:
            paper_gap = math.log(row.paper_test / beside["paper"]["test_perplexity"])
            gap = record["test_loss"] - beside["test_loss"]
            record["beside"] = {"name": row.beside, "gap": gap, "paper_gap": paper_gap}
        records.append(record)
    return records


def cells(record: dict[str, Any], baseline: str) -> list[str]:
    paper, first = record["paper"], record["name"] == baseline
    return [
        f"{record['title']} ({record['name']})",
        f"{record['parameters']:,}",
        perplexity(record["validation_perplexity"]),
        f"{paper['validation_perplexity']:.2f}",
        perplexity(record["test_perplexity"]),
        f"{paper['test_perplexity']:.2f}",
        f"{record['test_loss']:.4f}",
        "–" if first else f"{record['gap']:+.4f}",
        "–" if first else f"{paper['gap']:+.4f}",
        f"{record['flops_per_token'] / 1e6:,.3f}",
        f"{record['flops_of_baseline']:.4f}",
        shown(record["threshold"], ".4f"),
        shown(record["attention_fraction"], ".3f"),
        shown(record["gate"], ".3f"),
        shown(record["tokens_per_second"], ",.0f"),
    ]


def caption(plan: Plan, results: "list[Result]") -> list[str]:
    """What a reader must know before comparing, one sentence or two a line."""
    recipe, settings, corpus = plan.recipe, plan.settings, plan.corpora[0]
    share, epochs = plan.tokens / recipe.tokens, plan.tokens / corpus.split("train").tokens
    hardware = ", ".join(dict.fromkeys(result.test.device for result in results))
    torch = ", ".join(dict.fromkeys(result.run["versions"]["torch"] for result in results))
    lines = [
        f"{plan.tokens:,} training tokens a row: {100 * share:.3g}% of the paper's {recipe.tokens:,} ({recipe.epochs} "
        f"epochs of WikiText-103), {epochs:.3g} epochs of this corpus.",
        f"{settings.steps:,} step(s) of {settings.batch} × {settings.length} tokens (micro-batches of "
        f"{settings.micro_batch}), learning rate {settings.learning_rate:g} → {settings.final_learning_rate:g} by a "
        f"complete cosine after {settings.warmup:,} of warm-up, decay on matrices only (the released code decays "
        f"everything), {settings.precision}, seed {plan.seed}: the same for every row.",
        f"Corpus: {' + '.join(opened.name for opened in plan.corpora)}. Hardware: {hardware}, torch {torch}.",
        f"Validation is of the best weights by the evaluations every {settings.evaluate_every:,} step(s) (of at most "
        f"{settings.evaluate_rows:,} rows), test of the final weights; both are measured over the whole split in "
        f"blocks of {settings.length}, fp32.",
        f"Gaps are test losses in nats less that of {recipe.rows[0].name}; the paper's are logarithms of the ratio of "
        "its test perplexities. FLOPs are counted, tokens/s measured in training.",
    ]
    if not comparable(plan):
        lines.append(
            "This is not WikiText-103 in GPT-2's tokens, so perplexities do not compare with the paper's; gaps to the "
            "own baseline do, as far as budget and model are the paper's."
        )
    if plan.size != recipe.size:
        lines.append(f"Models of size {plan.size}, not the paper's {recipe.size}.")
    if plan.changes:
        changed = ", ".join(f"{name} = {value}" for name, value in plan.changes.items())
        lines.append(f"Departures from the recipe, in every row: {changed}.")
    if len(results) < len(plan.rows):
        lines.append(f"Unfinished: {len(results)} of {len(plan.rows)} rows.")
    for opened in plan.corpora:
        lines += [f"{opened.name}: {remark}" for remark in opened.remarks]
    lines += recipe.notes
    lines += dict.fromkeys(
        remark for result in results for remark in result.test.remarks if remark not in corpus.remarks
    )
    return lines


def comparable(plan: Plan) -> bool:
    corpus = plan.corpora[0]
    return corpus.name == "wikitext-103" and corpus.tokenizer_kind == "gpt2" and not corpus.remarks


def findings(records: list[dict[str, Any]]) -> list[str]:
    """Sentences about what has no column."""
    lines = []
    for record in records:
        if "beside" in record:
            beside = record["beside"]
            lines.append(
                f"{record['name']} against {beside['name']}: {beside['gap']:+.4f} nats, "
                f"the paper {beside['paper_gap']:+.4f}."
            )
        if len(record["gate_by_corpus_in_training"]) > 1:
            gates = record["gate_by_corpus_in_training"].items()
            each = ", ".join(f"{name} {value:.3f}" for name, value in gates)
            lines.append(f"{record['name']}, g when each corpus was last read in training: {each}.")
    return lines


def to_markdown(plan: Plan, results: "list[Result]") -> str:
    records = numbers(plan, results)
    lines = [f"# {plan.recipe.title}", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(cells(record, records[0]['name']))} |" for record in records]
    lines += ["", *(f"- {line}" for line in (*findings(records), *caption(plan, results)))]
    lines += ["", "```text", *(record["command"] for record in records), "```", ""]
    return "\n".join(lines)


def to_json(plan: Plan, results: "list[Result]") -> str:
    record = {
        "format": FORMAT,
        "complete": len(results) == len(plan.rows),
        "command": command_line(),
        "versions": versions(),
        "recipe": plan.recipe.name,
        "size": plan.size,
        "seed": plan.seed,
        "tokens": plan.tokens,
        "paper_tokens": plan.recipe.tokens,
        "steps": plan.settings.steps,
        "epochs": plan.tokens / plan.corpora[0].split("train").tokens,
        "data": {corpus.name: corpus.fingerprint for corpus in plan.corpora},
        "changes": plan.changes,
        "comparable_with_the_paper": comparable(plan),
        "caption": caption(plan, results),
        "rows": numbers(plan, results),
    }
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)


def to_rich(plan: Plan, results: "list[Result]") -> "list[Table | str]":
    from rich.table import Table

    records = numbers(plan, results)
    table = Table(*COLUMNS, box=None, title=plan.recipe.title, title_justify="left")
    for record in records:
        table.add_row(*cells(record, records[0]["name"]))
    return [table, *(f"note: {line}" for line in (*findings(records), *caption(plan, results)))]
