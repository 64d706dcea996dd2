"""What drafts of an early head bring a trained byte model: tokens that stay, and bytes a second against plain writing.

    OMP_NUM_THREADS=1 python benchmarks/speculation.py RUN --prompt-file text.txt --drafts 2,4,8

One row. Plain and speculative writing continue the same prompts in turns; greedy texts must be the same.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

from chiar.data.tokens import read_text_file
from chiar.errors import InputError
from chiar.generation.writer import Row, Sampling, Writer, open_writer
from timing import elapsed, exit_code, header, numbers, parser, say


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    add = made.add_argument
    add("model", help="a model folder or a training run, of a model with one dark stack")
    add("--prompt-file", type=Path, required=True, help="a text; prompts are cut out of it, evenly spread")
    add("--drafts", type=numbers(int, 1, 64), default=[2, 4, 8], help="most drafted tokens of a pass")
    add("--prompts", type=int, default=5)
    add("--prompt", type=int, default=256, help="characters of each prompt")
    add("--new", type=int, default=200, help="tokens behind each")
    return made.parse_args(arguments)


def measure(options: argparse.Namespace) -> None:
    model, codec, _ = open_writer(options.model, "prefill", False, None, options.device, say)
    text, where = read_text_file(options.prompt_file), header(options.device)
    starts = range(0, len(text) - options.prompt, max(1, (len(text) - options.prompt) // options.prompts))
    prompts = [codec.encode(text[start : start + options.prompt]) for start in starts][: options.prompts]
    say(f"{options.model} ({where}), {len(prompts)} prompts of {options.prompt}, {options.new} tokens behind each\n")
    say("| writing | drafts | stayed | tokens a pass | ms a token, plain | speculative | speed-up |")
    say("|---|---|---|---|---|---|---|")
    for how, settings in {"greedy": {}, "temperature 1": {"temperature": 1.0}}.items():
        for most in options.drafts:
            times: list[list[float]] = [[], []]
            drafted = kept = passes = 0
            for number, ids in enumerate(prompts):
                texts = []
                for way in (0, 1) if number % 2 else (1, 0):
                    writer, row = Writer(model, speculates=most * way), Row(codec, Sampling(options.new, **settings))
                    writer.begin(writer.read_prompt(ids), [row])
                    seconds = elapsed(lambda writer=writer, row=row: list(writer.follow(row)), options.device)
                    times[way].append(1e3 * seconds / len(row.tokens))
                    texts.append(row.text)
                    drafted, kept, passes = drafted + writer.drafted, kept + writer.kept, passes + writer.passes
                if how == "greedy" and texts[0] != texts[1]:
                    raise InputError("speculation wrote another text: its rounding turned a tie, or it is wrong.")
            plain, ours = (statistics.median(found) for found in times)
            ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
            cells = (
                f"{kept / max(drafted, 1):.0%}",
                f"{kept / passes + 1:.2f}",
                f"{plain:.2f}",
                f"{ours:.2f}",
                f"{ratio:.2f}",
            )
            say(f"| {how} | {most} | " + " | ".join(cells) + " |")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return exit_code(partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
