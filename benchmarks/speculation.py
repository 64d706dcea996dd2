"""Speculative decoding of a trained byte model with drafts of its early head: acceptance and speed.

    OMP_NUM_THREADS=1 python benchmarks/speculation.py RUN --prompt-file text.txt --drafts 2,4,8

One row at a time. Plain and speculative decoding continue the same prompts in turns; greedy texts must be equal.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

from chiar.data.tokens import read_text_file
from chiar.errors import InputError
from chiar.generation.writer import Row, Sampling, Writer, open_writer
from timing import describe_environment, echo, elapsed, exit_code, make_parser, numbers


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("model", help="model folder or training run of a model with one dark stack")
    add("--prompt-file", type=Path, required=True, help="text file; prompts are excerpts of it, evenly spread")
    add("--drafts", type=numbers(int, 1, 64), default=[2, 4, 8], help="maximum numbers of drafted tokens per pass")
    add("--prompts", type=int, default=5)
    add("--prompt", type=int, default=256, help="characters of each prompt")
    add("--new", type=int, default=200, help="tokens generated after each")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> None:
    model, codec, _ = open_writer(options.model, "prefill", False, None, options.device, echo)
    text, where = read_text_file(options.prompt_file), describe_environment(options.device)
    if len(text) <= options.prompt:
        raise InputError(f"{options.prompt_file} has {len(text)} characters, but --prompt takes {options.prompt}.")
    starts = range(0, len(text) - options.prompt, max(1, (len(text) - options.prompt) // options.prompts))
    prompts = [codec.encode(text[start : start + options.prompt]) for start in starts][: options.prompts]
    echo(f"{options.model} ({where}), {len(prompts)} prompts of {options.prompt}, {options.new} tokens after each\n")
    echo("| sampling | drafts | accepted | tokens per pass | ms per token, plain | speculative | speed-up |")
    echo("|---|---|---|---|---|---|---|")
    for how, settings in {"greedy": {}, "temperature 1": {"temperature": 1.0}}.items():
        for most in options.drafts:
            times: list[list[float]] = [[], []]
            drafted = kept = passes = 0
            for number, ids in enumerate(prompts):
                texts = []
                for way in (0, 1) if number % 2 else (1, 0):
                    writer, row = Writer(model, max_drafts=most * way), Row(codec, Sampling(options.new, **settings))
                    writer.begin(writer.read_prompt(ids), [row])
                    seconds = elapsed(lambda writer=writer, row=row: list(writer.follow(row)), options.device)
                    times[way].append(1e3 * seconds / len(row.tokens))
                    texts.append(row.text)
                    drafted, kept, passes = drafted + writer.drafted, kept + writer.kept, passes + writer.passes
                if how == "greedy" and texts[0] != texts[1]:
                    raise InputError("speculation generated another text: rounding decided a tie, or it is wrong.")
            plain, speculative = (statistics.median(own) for own in times)
            ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
            cells = (
                f"{kept / max(drafted, 1):.0%}",
                f"{kept / passes + 1:.2f}",
                f"{plain:.2f}",
                f"{speculative:.2f}",
                f"{ratio:.2f}",
            )
            echo(f"| {how} | {most} | " + " | ".join(cells) + " |")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return exit_code(partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
