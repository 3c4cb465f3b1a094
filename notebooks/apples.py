"""The text of the notebooks: lines whose law we know, so that right and wrong can be counted, and a model of them."""

import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

NAMES = ["Ann", "Ben", "Eva", "Kim", "Leo", "Mia"]
THINGS = ["apples", "books", "coins", "eggs", "hats", "pens"]
NUMBERS = range(2, 6)
ENTROPY = math.log(len(NAMES) * len(THINGS) * len(NUMBERS) ** 2)
"""Nats per line: all lines are equally likely."""
START = "#"
"""Stands before every line and is never masked. Where all is masked all positions look alike; this one does not, and
the others know where they are by their distance from it."""
RUN = Path("runs/apples")


def line(name, thing, a, b):
    """One line; its name, thing and sum come twice."""
    return f"{name} has {a} {thing} and gets {b} more. Now {name} has {a + b} {thing}."


def lines():
    """Every line there is, in a random order."""
    found = [line(*parts) for parts in itertools.product(NAMES, THINGS, NUMBERS, NUMBERS)]
    random.Random(0).shuffle(found)
    return found


def mistake(text):
    """What is wrong with a line; None if nothing is."""
    found = re.fullmatch(r"(\w+) has (\d+) (\w+) and gets (\d+) more. Now (\w+) has (\d+) (\w+).", text)
    if found is None:
        return "form"
    name, a, thing, b, name_again, total, thing_again = found.groups()
    if name != name_again:
        return "name"
    if thing != thing_again:
        return "thing"
    return None if int(a) + int(b) == int(total) else "sum"


def train(*options, processes=1):
    """Write the lines and train as `apples.yaml` says, with these options; prints what the training prints."""
    examples = [json.dumps({"prompt": START, "completion": text}) for text in lines()]
    Path("lines.jsonl").write_text("\n".join(examples) + "\n")
    command = [sys.executable, "-m"]
    if processes > 1:  # "multi_gpu" is accelerate's word for several processes, also without a GPU
        launch = ["--multi_gpu", f"--num_processes={processes}", "--num_machines=1", "--mixed_precision=no"]
        command += ["accelerate.commands.launch", *launch, "--dynamo_backend=no", "--main_process_port=0", "-m"]
    command += ["mdlm.training", f"--config={Path(__file__).with_name('apples.yaml')}", *options]
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}  # Jupyter's: plain lines
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as running:
        for printed in running.stdout:
            print(printed, end="")
    if running.returncode:
        raise RuntimeError(f"the training ended with status {running.returncode}; what it printed says why")


def ensure_model():
    """The folder of the model of the first notebook, trained now if it is not there."""
    if not any(RUN.glob("checkpoint-*")):
        train("--overwrite")
    return RUN
