"""Options of every command: the arguments that it takes, with their help and defaults.

Light, since help pages are made from them: a command's own module is imported when the command is run.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from atlas_fl.config import Config
from atlas_fl.config.settings import Positional
from atlas_fl.deployment.consent import ServiceChoices, SiteChoices
from atlas_fl.frozen import Frozen
from atlas_fl.ranges import Range

STRATEGIES = ("local", "fedavg_cluster", "atlas")
PrivacyAttackName: TypeAlias = Literal["membership", "tokens", "canaries", "properties", "cuts"]
What: TypeAlias = Literal["tasks", "models", "strategies", "devices", "presets", "conflicts"]


class SettingsOptions(Frozen):
    """Options of a command that takes every setting as a flag."""

    config: str | None = None
    """A TOML or YAML file of settings, such as the config.toml of a run."""
    settings: Config = field(default_factory=Config)


class TrackerOptions(Frozen):
    """Experiment trackers that a run is logged to besides its folder; each is an extra of the package."""

    tracker: tuple[str, ...] = ()
    """Log to the tracker of a plug-in too: `name=place`, such as `wandb=PROJECT`; may be repeated."""


class RunsDirOptions(Frozen):
    """Options of a command that finds runs by their names."""

    runs_dir: str = "runs"
    """Where run folders lie."""


class OneRunOptions(RunsDirOptions):
    """Options of a command on one run."""

    run: Annotated[str, Positional("RUN")]
    """Folder of the run, or its name in --runs-dir."""


class RunOptions(TrackerOptions, SettingsOptions):
    """Train a federation and leave a run folder. The defaults below are those of --preset and, over it, of --config."""

    resume: bool = False
    """Go on with the run of these settings, if it was begun."""


class PlanOptions(SettingsOptions):
    """Show clusters, the k table, ranks, and predicted bytes, memory and seconds of a run; trains nothing and writes
    nothing but with --to."""

    to: str | None = None
    """Write the plan as JSON to this file as well."""


class ResumeOptions(TrackerOptions, OneRunOptions):
    """Go on with a run where its last checkpoint is; it ends with the same bits as one that was never stopped."""

    max_rounds: Annotated[int | None, Range(least=1)] = None
    """Stop after this many rounds."""


class FetchOptions(Frozen):
    """Get what the default run needs, the model all-MiniLM-L6-v2 and the labelled texts (embedded), what the vision
    presets need, a DINOv2 ViT-S/14 and Fashion-MNIST (vision), or a language model, SmolLM2-135M-Instruct (llm), into a
    cache of the user's; checked by SHA-256, and nothing is fetched twice. ATLAS_CACHE names another folder."""

    what: Annotated[Literal["embedded", "vision", "llm"], Positional("WHAT")] = "embedded"
    """Assets to get."""


class ListOptions(Frozen):
    """Show what there is to choose from. Without a word, what can be listed."""

    what: Annotated[What | None, Positional("WHAT")] = None
    """Registry to list."""
    name: Annotated[str | None, Positional("NAME")] = None
    """A strategy, to show it alone with its own settings."""
    plugin: tuple[str, ...] = ()
    """Plug-ins whose registrations are listed too; may be repeated."""


class CheckMethodOptions(Frozen):
    """Check that the methods of a plug-in obey the laws of methods: rows that sum to one, no order of clients, absent
    clients, a restart and others; exits with 1 where one does not."""

    plugin: Annotated[str, Positional("FILE_OR_MODULE")]
    """The plug-in, as --plugin takes it."""


class ReportOptions(RunsDirOptions):
    """Write one page, report.html, that shows a run or compares several: a file that opens in any browser and loads
    nothing. Also draw the figures of each run, as PNG and PDF with their numbers as CSV, into its folder `figures`."""

    runs: Annotated[tuple[str, ...], Positional("RUN ...")]
    """Folders of runs, or their names in --runs-dir."""
    to: str | None = None
    """The page; by default report.html in the run's folder, or beside the first of several runs."""
    control: str | None = None
    """Strategy that the others are compared with, of several runs; fedavg_cluster, fedavg or local by default."""
    page_only: bool = False
    """Write the page and draw no figures."""
    plugin: tuple[str, ...] = ()
    """Plug-ins with figures of your own; those that a run names are not loaded. May be repeated."""


class EvaluateOptions(OneRunOptions):
    """Score the models of a finished run on their clients' own rows, the frozen model and clients alone beside them,
    and let those that write text answer; leaves evaluation.json and answers.jsonl in the run's folder."""

    client: tuple[str, ...] = ()
    """Clients that are scored; all by default."""
    split: Literal["validation", "test"] = "test"
    """Rows that are scored."""
    answers: int | None = None
    """Most prompts that each client's models answer; the run's --rouge-examples by default."""
    new_tokens: int | None = None
    """Most tokens of an answer; the run's --new-tokens by default."""
    choices: tuple[str, ...] = ()
    """Answers among which each prompt's likeliest is found, as in `--choices yes no`, or the word `answers` for all
    that a client was trained on; by default those that the rows have (chat=choices)."""
    judge: str | None = None
    """Address of a judge model (OpenAI-compatible, `http://localhost:8000/v1`) that compares the kept answers of base
    and federation: prompts, references and answers leave this machine for it. A key is read from ATLAS_JUDGE_KEY."""
    judge_model: str | None = None
    """Name of the judge model there."""
    harness: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness that the base and the adapters of --client are scored on instead of their own
    rows; an extra of the package. Leaves harness.json in the run's folder."""
    harness_tasks: str | None = None
    """A folder of further such tasks: YAML files, which may run code of their own."""
    harness_limit: int | None = None
    """Most examples of such a task."""
    harness_chat: bool = False
    """Ask them in the chat template."""


class GenerateOptions(RunsDirOptions):
    """Let a client's model of a finished run write what follows a text."""

    run: Annotated[str, Positional("RUN")]
    """Folder of the run, or its name in --runs-dir."""
    text: Annotated[str, Positional("TEXT")]
    """The prompt."""
    client: str
    """The client whose model answers."""
    kind: Literal["base", "alone", "federated"] = "federated"
    """The model that answers: the frozen one, the client's own alone, or the one of the federation."""
    new_tokens: int = 64
    """Most tokens of the answer."""
    system: str | None = None
    """The system message of the conversation, for a client whose conversations had one."""


class ResultsOptions(Frozen):
    """Write one page of results from all finished runs below some folders: a table of methods for each federation with
    tests against the control, and ranks over all of them."""

    folders: Annotated[tuple[str, ...], Positional("FOLDER ...")]
    """Folders in which runs lie, at any depth, and CSV files that --csv wrote."""
    to: str | None = None
    """The file to write, a page with charts if its name ends with .html, else Markdown, which is printed by default."""
    csv: str | None = None
    """A file for the runs themselves, one row each: scores, bytes, and the flags that make the run again."""
    control: str | None = None
    """The strategy that the others are tested against; by default the first of fedavg_cluster, fedavg and local that a
    federation has."""
    all: bool = False
    """Write also the tables that `atlas report` folds: clients, probabilities, tests."""


class AuditOptions(OneRunOptions):
    """Recompute every round of a run that was made with --audit, from its plan, in float64 and by other code than the
    run's; compare what clients loaded with what the server sent; exits with 1 on any mismatch."""


class ExportOptions(OneRunOptions):
    """Write the model of one client, or the one model of all: adapter and head as `PeftModel.from_pretrained` reads
    them, or of a run that trained whole models all of it, as `AutoModelForImageClassification.from_pretrained` does."""

    client: str | None = None
    """Name of the client, such as movie-0, or its number from 0 on in the order of the plan."""
    global_: bool = False
    """Write the one model that all clients end with, as under fedavg with one task and one rank, in the place of
    --client."""
    to: str
    """A new folder to write to."""
    round: str | None = None
    """`best` for the round with the best mean validation score, or a number; the last one by default. Rounds of before
    are there where `--keep-best` or `--keep-checkpoints` kept them."""
    form: Literal["adapter", "merged", "gguf"] = "adapter"
    """An adapter beside its base (PEFT), merged into it (transformers), or of a language model as a file of llama.cpp
    (GGUF). A whole model is whole under the first."""
    push_to: str | None = None
    """Upload the folder to the hub as this model, OWNER/NAME, after it is written; private but for --public."""
    public: bool = False
    """Make the uploaded model one that everybody can read."""


class PlaceOptions(OneRunOptions):
    """Say to which cluster of a run a newcomer belongs: its fingerprint is taken as the run took those of its clients;
    trains nothing federally and writes nothing."""

    task: str
    """The newcomer's data: your own as `name=path`, with text=, pair= and label= as needed, or a task's name."""
    samples: int | None = None
    """Training examples that it has; as many as a client of the run by default."""


class AttackOptions(SettingsOptions):
    """Try to learn training examples out of what clients send, under the same settings as `atlas run`: `membership` of
    an example in one client's models, `tokens` out of its updates, a lower bound of epsilon by `canaries`, `properties`
    of its examples out of its fingerprint, or what `cuts` give away of texts. Each has the level of guessing beside.
    Writes nothing but with --to."""

    what: Annotated[PrivacyAttackName, Positional("ATTACK")]
    """The attack."""
    client: str | None = None
    """Client that is attacked, alone; the first by default. cuts: all of them."""
    shadows: int | None = None
    """membership, canaries and properties: shadow clients, of whom the attacker knows the truth; 16 by default."""
    cuts: tuple[int, ...] = ()
    """cuts: blocks on the client; every possible number by default."""
    to: str | None = None
    """Write the table as JSON to this file as well."""


class MasksOptions(Frozen):
    """Show and draw where masks let weights move, and how far several of them agree; with --merge write one mask for a
    run to come (`--mask-file`)."""

    masks: Annotated[tuple[str, ...], Positional("RUN|FILE ...")]
    """Folders of runs, their names in --runs-dir, or files of masks."""
    merge: Literal["none", "union", "intersection"] = "none"
    """Make one mask: what at least one of them lets move, or what all do."""
    to: str | None = None
    """The file that the merged mask is written to."""
    runs_dir: str = "runs"
    """Where run folders lie, and the figures of several masks; those of one lie in its folder."""


class VectorsOptions(RunsDirOptions):
    """Merge what finished runs on images have added to one model, and score the merged model on the tasks of all of
    them, at several scales. With --to the best one by validation is written, as stock transformers load it."""

    runs: Annotated[tuple[str, ...], Positional("RUN ...")]
    """Folders of runs, or their names in --runs-dir."""
    base: str | None = None
    """Model that is subtracted: a run, an alias, a hub name or a directory; by default that of the runs."""
    merge: Literal["mean", "ties"] = "mean"
    """Way in which task vectors become one: their mean, or TIES (trim, elect signs, merge)."""
    keep: float = 0.2
    """Share of each task vector that TIES keeps."""
    scales: str = "0,0.25,0.5,0.75,1"
    """Factors of the merged vector; 0 is the base with the runs' heads, below 0 the task is forgotten."""
    to: str | None = None
    """A new folder for the merged models, the table as CSV, and its figure."""


class SweepOptions(SettingsOptions):
    """Run every combination of the swept values with several seeds; finished runs are left alone, begun ones go on.
    Ends in tables, their CSV and LaTeX files, and a figure."""

    over: tuple[str, ...] = ()
    """A setting and its values, `eta=0,0.01,0.1`; may be repeated. Parts of a list are joined by +: `share=A+B,B`."""
    lambda_sweep: bool = False
    """The same as `--over eta=0,0.01,0.1,0.5,1` with the strategy atlas_laplacian."""
    seeds: tuple[int, ...] = (1,)
    """Number of seeds of each combination: 42, 123, 456, 789, 1024, then 2001 and on. Several numbers are the seeds."""


class CompareOptions(SettingsOptions):
    """Run several strategies with several seeds; finished runs are left alone, begun ones go on. Ends in tables, their
    CSV and LaTeX files, a figure and a page."""

    strategies: tuple[str, ...] = STRATEGIES
    """The strategies (`atlas list strategies`); `--ablation` is the same flag."""
    over: tuple[str, ...] = ()
    """A setting and its values beside the strategies, `dial=1,3`, `eta=0,0.5` or `preset=null,label-skew`; may be
    repeated. Values of what methods set are rows of one table; other values are compared by themselves and ranked."""
    seeds: tuple[int, ...] = (3,)
    """Number of seeds of each strategy: 42, 123, 456, 789, 1024, then 2001 and on. Several numbers are the seeds."""
    control: str | None = None
    """The strategy that the others are tested against; by default the first of fedavg_cluster, fedavg and local."""
    score: Literal["final", "best"] = "final"
    """Test scores of the models that clients end with, or of the best round by validation."""
    trials: Annotated[int, Range(least=0, most=20)] = 0
    """Settings of each strategy that are tried beforehand on development seeds; the best by validation is compared.
    With more of them, learning rates would reach a thousand times the default."""
    jobs: Annotated[int, Range(least=1)] = 1
    """Runs at once, each in a process of its own with its share of the cores."""


class ServeOptions(ServiceChoices, SettingsOptions):
    """Train a federation whose clients join from other machines, each with its own certificate and data. The same
    command goes on where it was. Tasks, clients and devices are those of the sites, not those of the settings."""

    certs: str = "certs/server"
    """The folder `server` of `atlas certs make`; its clients.txt lists who may join."""
    again: tuple[str, ...] = ()
    """Clients of a complete run that get their model once more: they had it, and its files are lost."""
    implied: ClassVar[Mapping[str, Any]] = {"max_share": 0.5}
    """Settings in the place of defaults where neither a file nor a flag says them: sites may claim any examples."""


class JoinOptions(SiteChoices):
    """Take part in a federation with the data of this machine. The data stays here; counts, label statistics, sketches
    and adapters travel. Ends when the server's run is complete; a connection that is lost is made again."""

    address: Annotated[str, Positional("HOST:PORT")]
    """Where `atlas serve` runs."""
    certs: str
    """This site's folder of `atlas certs make`."""
    config: str | None = None
    """A TOML or YAML file of settings; this site works for no server with others."""


class CertsOptions(Frozen):
    """The certificates of a federation across machines. `make DIR` makes an authority, a server and a folder for each
    site, or adds sites where --server is left out; `renew NAME` replaces a site's certificate and `revoke NAME` takes
    it off the list, while the server runs too. A site that makes its own key says `request NAME`, and `sign REQUEST`
    answers it where the authority lies. Nothing is overwritten."""

    what: Annotated[Literal["make", "renew", "revoke", "request", "sign"], Positional("ACTION")]
    """Action to carry out."""
    subject: Annotated[tuple[str, ...], Positional("DIR|NAME|REQUEST")]
    """make: the folder in which ca (keep it safe), server, and one named after each client are made. renew, revoke and
    request: names of sites. sign: the file request.pem that a site has made."""
    to: str | None = None
    """renew, revoke and sign: the folder that make has made; certs by default. request: the folder in which the key is
    made and stays; the site's name by default."""
    server: tuple[str, ...] = ()
    """make: host names and addresses under which sites reach the server; may be repeated."""
    client: tuple[str, ...] = ()
    """make: names of the sites; may be repeated."""
    days: int = 365
    """Days that the certificates hold, and not longer than their authority."""


class DoctorOptions(RunsDirOptions):
    """Show what is installed, which devices there are, what is missing and how to get it; exits with 1 where something
    is missing that the presets smoke and quick need."""


class DemoOptions(RunsDirOptions):
    """Train a first federation and write its page: says what happens and what to look at. The run is that of
    `atlas run --preset quick`; given again, the command goes on where it was stopped."""

    preset: Literal["quick", "smoke"] = "quick"
    """Preset of the run: smoke takes a tenth of the time and only shows that everything works."""
