"""The commands, one function each."""

import sys
import time
from pathlib import Path

from jaxlayers.cli.input import load_model, read_program, read_stdin, read_text
from jaxlayers.cli.output import (
    Args,
    Interrupted,
    Result,
    check_picture,
    note,
    picture_of,
    print_table,
    progress,
    save,
)

UNFINISHED = "Interrupted: this is the best so far; the same command goes on from here."


def evaluate(args: Args) -> Result:
    text = read_text(args.text)
    if args.tokens is not None and args.tokens < 2:
        raise ValueError(f"--tokens must be at least 2, not {args.tokens}: the first token is not predicted.")
    model = load_model(args)
    program = read_program(args.program, model.decoder.config.layers)

    from jaxlayers.decoder.stack import fastest_form
    from jaxlayers.evaluate import evaluate
    from jaxlayers.generate.text import tokenizer_of

    ids = tokenizer_of(model).encode(text)[: args.tokens]
    decoder = fastest_form(model.decoder)
    start = time.perf_counter()
    with progress(args, "evaluating") as report:
        found = evaluate(decoder, ids, program, args.window, report=report)
    result: Result = {
        "mean_nll": found.mean_nll,
        "ppl": found.ppl,
        "tokens": found.tokens,
        "visits": program.visits,
        "seconds": time.perf_counter() - start,
    }
    print_table(args, result)
    return result


def generate(args: Args) -> Result:
    from jaxlayers.generate.sampling import Sampling

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed).checked()
    prompt = read_stdin() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ValueError("the prompt is empty; give at least one word.")
    model = load_model(args)
    program = read_program(args.program, model.decoder.config.layers)

    from jaxlayers.generate.text import generate_text

    def show(_: int, piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    stream = not args.json and sys.stdout.isatty()
    start = time.perf_counter()
    done = generate_text(
        model,
        prompt,
        program,
        max_tokens=args.max_tokens,
        sampling=sampling,
        stop=args.stop,
        chat=args.chat,
        ignore_eos=args.ignore_eos,
        on_text=show if stream else None,
        block=4 if stream else 16,
    )[0]
    seconds = time.perf_counter() - start
    if not args.json:
        print("" if stream else done.text)
        n = len(done.token_ids)
        note(args, f"{n} tokens in {seconds:.1f} s, {program.visits} visits a token; ended by {done.reason}")
    return {
        "text": done.text,
        "token_ids": done.token_ids,
        "visits": program.visits,
        "seconds": seconds,
    }


def program(args: Args) -> Result:
    if args.picture:
        check_picture(args.picture)
    found = read_program(args.program, args.depth)
    if args.picture:
        from jaxlayers.plot import program_figure

        save(program_figure(found), args.picture)
    if not args.json:
        print(found.describe())
    return {
        "program": str(found),
        "rows": found.rows,
        "lanes": found.lanes,
        "slots": found.slots,
        "visits": found.visits,
        "layers": list(found.layers),
    }


def export(args: Args) -> Result:
    model = load_model(args)
    program = read_program(args.program, model.decoder.config.layers)

    from jaxlayers.weights.export import export

    start = time.perf_counter()
    folder = export(model.decoder, program, args.out, model.tokenizer)
    result: Result = {
        "folder": str(folder),
        "program": str(program),
        "layers": program.visits,
        "seconds": time.perf_counter() - start,
    }
    print_table(args, result)
    return result


def bench(args: Args) -> Result:
    from jaxlayers import bench

    if args.name not in bench.NAMES:
        raise ValueError(f"there is no bench {args.name!r}; name one of {', '.join(bench.NAMES)}.")
    from jaxlayers import startup

    startup.start()
    note(args, f"measuring {args.name}, both sides in turn ...")
    result = bench.run(args.name, args.model)
    print_table(args, result, digits=4)
    return result


def tasks(args: Args) -> Result:
    from jaxlayers.search.made_tasks import KINDS, make_tasks
    from jaxlayers.search.tasks import write_tasks

    made = make_tasks(args.seed)
    write_tasks(made, args.out)
    result: Result = {"out": str(args.out), "tasks": len(made)}
    result |= {kind: sum(task.kind == kind for task in made) for kind in KINDS}
    print_table(args, result)
    return result


def search(args: Args) -> Result:
    picture = picture_of(args, args.out)
    from jaxlayers.search.tasks import read_tasks, spread

    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit must be at least 1, not {args.limit}.")
    if not args.out.parent.is_dir() or args.out.is_dir():
        raise ValueError(f"--out {args.out} must be a file in a folder that exists; make the folder first.")
    if args.out.resolve() == Path(args.tasks).resolve():
        raise ValueError(f"--out {args.out} would replace the tasks; name another file.")
    if args.seed < 0:
        raise ValueError(f"--seed must be at least 0, not {args.seed}.")
    asked = spread([task for task in read_tasks(args.tasks) if args.split in (None, task.split)], args.limit)
    if not asked:
        raise ValueError(f"{args.tasks} has no task of the split {args.split!r}; leave out --split for all.")
    model = load_model(args)

    from jaxlayers.files import reserved
    from jaxlayers.generate.text import tokenizer_of
    from jaxlayers.plot import search_figure
    from jaxlayers.search import report
    from jaxlayers.search.campaign import Campaign, conditions
    from jaxlayers.search.found import write_found

    plan = [each for each in conditions(args.simulations) if each.name == "cola" or args.controls]
    start = time.perf_counter()
    found, complete = [], False
    with reserved(args.out):
        with progress(args, "searching") as moved:
            campaign = Campaign(
                model.decoder,
                tokenizer_of(model),
                asked,
                plan,
                args.seed,
                args.out.with_name(args.out.name + ".journal"),
                args.per_token,
                report=moved,
            )
            try:
                for group in campaign.run():
                    found += group
                complete = True
            except KeyboardInterrupt:
                found += campaign.so_far()
                if not found:
                    raise
        found = campaign.ordered(found)
        if complete:
            write_found(found, args.out, campaign.depth)
            campaign.journal.remove()
    result = report.summary(found)
    if not args.json:
        report.show(result, found)
        if campaign.lengths:
            saved = f"{campaign.visits:,} of {campaign.lengths:,} ({campaign.visits / campaign.lengths:.2f})"
            print(f"Visits executed, of those of all programs one by one: {saved}.")
        print(f"Wrote {args.out}." if complete else UNFINISHED)
    save(search_figure(found, campaign.depth), picture)
    note(args, f"drew {picture}")
    told = report.plain(result) | {
        "complete": complete,
        "out": str(args.out),
        "picture": str(picture),
        "visits": campaign.visits,
        "visits_alone": campaign.lengths,
        "seconds": time.perf_counter() - start,
    }
    if not complete:
        raise Interrupted(told)
    return told


def report(args: Args) -> Result:
    if args.found.is_dir():
        raise ValueError(f"{args.found} is a folder; name a file that `jaxlayers search` wrote.")
    picture = picture_of(args, args.found)
    from jaxlayers.plot import search_figure
    from jaxlayers.search import report
    from jaxlayers.search.found import read_found

    found = read_found(args.found)
    result = report.summary(found)
    if not args.json:
        report.show(result, found)
    save(search_figure(found, depth=len(found[0].scores[0].ids)), picture)
    note(args, f"drew {picture}")
    return report.plain(result) | {"picture": str(picture)}


def painters(args: Args) -> Result:
    text = None if args.text is None else read_text(args.text)
    if args.tokens < 2:
        raise ValueError(f"--tokens must be at least 2, not {args.tokens}: the first token is not predicted.")
    if args.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, not {args.seeds}: the random order needs one.")
    model = load_model(args)

    from jaxlayers.demo import TEXT
    from jaxlayers.files import new_folder
    from jaxlayers.generate.text import tokenizer_of
    from jaxlayers.measure.painters import NUMBERS, PICTURE, painters, show, write

    start = time.perf_counter()
    ids = tokenizer_of(model).encode(TEXT if text is None else text)
    ids = ids[: min(args.tokens, model.decoder.config.context)]
    with new_folder(args.out) as folder:  # before the work, because it fails sooner
        with progress(args, "running programs") as moved:
            results = {"model": args.model, **painters(model.decoder, ids, args.seeds, moved)}
        write(results, folder)
    if not args.json:
        show(results)
    seconds = time.perf_counter() - start
    note(args, f"wrote {args.out / NUMBERS} and {args.out / PICTURE} in {seconds:.0f} s")
    measurements = "interventions", "delete", "swap"  # in painters.json
    return {key: value for key, value in results.items() if key not in measurements} | {
        "out": str(args.out),
        "seconds": seconds,
    }


def demo(args: Args) -> Result:
    text = None if args.text is None else read_text(args.text)
    from jaxlayers import startup
    from jaxlayers.demo import demo

    startup.start()
    start = time.perf_counter()
    demo(args.model, text, args.out, show=not args.json)
    return {"out": str(args.out), "seconds": time.perf_counter() - start}
