"""The whole configuration of a run: one strict model with a section for each part.

What always holds:

* An unknown key is an error, and no value is converted on the quiet: `"128"` is not a number, `1` is not `true`.
* A config is frozen, and every combination that can't run was refused when it was made.
* Every field says what it is for; `pace-agent config show` prints these words above each key.

A field that may be empty is emptied by the word `"none"`, because TOML has no null.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from pace_agent.config.clock import ClockSection
from pace_agent.config.section import FolderPath, Positive, Seconds, Section
from pace_agent.config.sglang import SglangSection, check_sglang
from pace_agent.config.trainer import TrainerOptions, divisors


def _concurrency(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError(f"{value!r} is no number of rollouts, which is at least 1; or write 'auto'")


Concurrency = Annotated[int | Literal["auto"], PlainValidator(_concurrency)]


class EnvSection(Section):
    """The environment: what the model is asked to do, and how it is rewarded."""

    id: str = "pace/Shop-v0"
    """An id that `pace-agent env list` shows, or `module:Class` for an environment of your own."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor, as `--env.kwargs.NAME VALUE` on the command line."""
    tasks: str | None = None
    """Tasks from elsewhere: a JSONL file, or `hf:DATASET`. Empty: the environment's own."""
    reward: str | None = None
    """A reward function of your own, as `module:function`. Empty: the environment's own."""


class ModelSection(Section):
    """The model that is trained."""

    path: str = "embedded"
    """A Hugging Face folder with weights, tokenizer and chat template; `embedded`: the small model that comes along."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trained weights and of the engine's. float32 keeps log-probabilities comparable between the two."""
    lora_r: Annotated[int, Field(ge=0)] = 0
    """Rank of LoRA adapters; 0 trains all weights. Adapters are merged whenever weights go to the engine."""
    lora_alpha: Positive = 32
    """Scale of the adapters, over their rank. Without effect while `lora_r` is 0."""
    tool_parser: Literal["hermes"] = "hermes"
    """How the model writes tool calls: `hermes` is JSON in `<tool_call>` tags (Qwen, Hermes)."""


class EngineSection(Section):
    """What generates tokens while the trainer works."""

    kind: Literal["local", "sglang"] = "local"
    """`local`: transformers on this machine, with continuous batching. `sglang`: SGLang servers, as the section
    `sglang` says; of the keys here only `process` and `context` count then."""
    process: bool = True
    """Play rollouts and generate in a process of their own, so that they overlap with training. false keeps them in a
    thread beside it, which is simpler to debug."""
    slots: Positive = 128
    """Sequences that decode together; rollouts beyond that wait. More slots cost memory and slow each step."""
    context: Positive | None = None
    """Longest sequence in tokens. Empty: what the model's config says."""
    threads: Positive = 1
    """Torch threads of the engine. On busy cores one thread is faster than two, which wait for each other."""
    stale_cache: Literal["recompute", "keep"] = "recompute"
    """After a weight update, `recompute` kept prefixes under the new weights, or `keep` their stale cache (faster, and
    the log-probabilities are then no longer those of any one version)."""


class RolloutSection(Section):
    """How episodes are played, and when they end."""

    concurrency: Concurrency = 48
    """Rollouts in flight. What exceeds the trainer's pace becomes staleness, so more is not better. `auto`: found while
    the run goes on, up to `engine.slots`, so that production stays just above what the trainer takes."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts of one task. Advantages compare a rollout with the others of its group."""
    max_turns: Positive = 5
    """Turns of the model."""
    max_turn_tokens: Positive = 32
    """Sampled tokens of one turn. A tool call cut off here is not executed."""
    max_tokens: Positive = 160
    """Sampled tokens of a rollout, over all its turns."""
    max_context: Positive | None = 256
    """Tokens of the whole sequence, prompts and tool results with it. Empty: the engine's context."""
    max_tool_calls: Annotated[int, Field(ge=0)] | None = None
    """Tool calls of a rollout; 0 allows none. Empty: no limit but the turns."""
    max_seconds: Seconds | None = 600.0
    """Seconds of a rollout, tools and waiting with it. Empty: no limit."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature. The trainer uses the same one, or its ratios would be wrong."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens with this probability. Below 1 the ratios are only approximate."""
    max_attempts: Positive = 3
    """Tries of a task, the first one included, before it is given up."""
    requeue: bool = True
    """Send the task of a rejected or failed rollout back to be tried again."""
    max_failure_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Stop the run when more than this share of recent rollouts failed: something is broken then."""


class PoolSection(Section):
    """The PACE pool: completed rollouts wait here, and too stale ones are rejected when a batch is drawn."""

    policy: Literal["pace", "sync", "unfiltered", "max_staleness", "bounded_admission", "drop_oldest"] = "pace"
    """Who may start, who is rejected, who is drawn. All but `pace` are baselines to compare with."""
    batch_size: Positive = 64
    """Trajectories of one optimiser step; a multiple of `rollout.group_size`."""
    unit: Literal["trajectory", "group"] = "trajectory"
    """Rank, reject and draw single trajectories, or whole groups for losses that need them together."""
    target: Positive | None = None
    """Occupancy above which there is an excess, in trajectories. Empty: one batch."""
    beta: Annotated[float, Field(ge=0)] = 1.0
    """Share of the excess that a draw may reject."""
    cap: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Largest share of the pool that a draw may reject."""
    lam: Annotated[float, Field(ge=0)] = 1.0
    """Weight of generation staleness against waiting staleness (lambda)."""
    staleness: Literal["tokens", "turns", "span", "none"] = "tokens"
    """How generation staleness counts: by the share of stale tokens (`tokens`), the oldest token (`span`), the mean of
    the turns (`turns`), or not at all (`none`)."""
    order: Literal["fifo", "freshest"] = "fifo"
    """Which of the remaining ones are drawn first."""
    fairness: Literal["length", "none"] = "length"
    """`length` spreads rejections over all lengths, or long rollouts would lose; `none` ranks by staleness alone."""
    bins: Positive = 16
    """Length bins for `fairness = "length"`. More bins keep the mix of lengths closer and reject less by staleness."""
    max_staleness: Annotated[int, Field(ge=0)] = 4
    """Oldest token allowed, in versions. For `policy = "max_staleness"` alone."""
    eta: Annotated[int, Field(ge=0)] = 2
    """Batches that production may run ahead. For `policy = "bounded_admission"` alone."""
    capacity: Positive | None = None
    """Waiting trajectories at which no new rollout starts. Empty: eight batches."""


class SandboxSection(Section):
    """Where code that the model wrote runs. Environments without such code ignore this."""

    backend: Literal["auto", "bwrap", "docker", "subprocess"] = "auto"
    """`bwrap` isolates with bubblewrap, and is what `auto` means; `docker` with a container for each session.
    `subprocess` isolates nothing and needs `unsafe`. What can't work here stops the run."""
    timeout: Seconds = 10.0
    """Seconds of one execution."""
    memory_mib: Annotated[int, Field(ge=16)] = 1024
    """Memory of a session, in MiB."""
    processes: Positive = 64
    """Processes of a session."""
    disk_mib: Positive = 64
    """Writable space in each of a session's /box, /tmp and /dev/shm, in MiB."""
    files: Annotated[int, Field(ge=16)] = 16384
    """Files and folders in each of these."""
    cpu_seconds: Positive = 600
    """Processor time of each process of a session, over all its calls."""
    output_kib: Positive = 1024
    """Output kept of an execution, in KiB, three quarters for stdout: the head and the tail of each."""
    packages: bool = False
    """With bubblewrap: give code the running Python and what is installed beside it, instead of the system's."""
    modules: list[str] = Field(default_factory=list)
    """Imported by Python before any code runs, such as numpy, so that importing them again takes no time."""
    image: str | None = None
    """With Docker: an image with `python3`. Empty: one is built from this machine's Python, with numpy and sympy."""
    runtime: str | None = None
    """With Docker: a runtime that the daemon knows, such as `runsc` for gVisor. Empty: its default."""
    prewarm: Annotated[int, Field(ge=0)] = 4
    """Sessions kept ready ahead of the rollouts that will want them."""
    unsafe: bool = False
    """Allow a backend that isolates nothing. The model's code then runs with your rights."""


class EvalSection(Section):
    """Evaluation during training, on tasks that training never draws. `pace-agent eval` has options of its own."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 turns them off."""
    tasks: Positive = 100
    """Held-out tasks."""
    n: Positive = 1
    """Rollouts of each task."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 0 takes the likeliest token."""


class RunSection(Section):
    """The run itself: where it is kept, and how often it is saved."""

    dir: FolderPath | None = None
    """The run folder. Empty: `runs/<environment>-<time>`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of tasks, sampling and training."""
    threads: Positive = 1
    """Torch threads of the trainer, beside those of the engine."""
    checkpoint_every: Positive = 20
    """Steps between checkpoints. A crash loses what came after the last one."""
    keep_checkpoints: Positive = 2
    """Checkpoints kept, newest first; the best one is kept apart."""
    log_every: Positive = 1
    """Steps between rows of metrics."""
    report_to: list[str] = Field(default_factory=list)
    """Trackers that get the metrics too, as TRL names them: trackio, wandb, tensorboard."""


class RunConfig(Section):
    """Everything that decides a run."""

    env: EnvSection = Field(default_factory=EnvSection)
    model: ModelSection = Field(default_factory=ModelSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    sglang: SglangSection = Field(default_factory=SglangSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    pool: PoolSection = Field(default_factory=PoolSection)
    sandbox: SandboxSection = Field(default_factory=SandboxSection)
    trainer: TrainerOptions = Field(default_factory=dict)
    """Options of TRL's GRPOConfig, under TRL's names, over the defaults of the embedded job."""
    eval: EvalSection = Field(default_factory=EvalSection)
    clock: ClockSection = Field(default_factory=ClockSection)
    run: RunSection = Field(default_factory=RunSection)

    @model_validator(mode="after")
    def _fits_together(self) -> "RunConfig":
        pool, batch = self.pool, self.pool.batch_size
        _check_multiple("pool.batch_size", batch, "rollout.group_size", self.rollout.group_size)
        micro = self.trainer.get("per_device_train_batch_size", 1)
        if batch % micro:
            closest = min(divisors(batch), key=lambda divisor: (abs(divisor - micro), -divisor))
            raise ValueError(
                f"trainer.per_device_train_batch_size = {micro} does not divide pool.batch_size = {batch}; "
                f"the closest that does is {closest}"
            )
        if pool.target is not None and pool.target < batch:
            raise ValueError(f"pool.target = {pool.target} is below pool.batch_size = {batch}; the lowest is {batch}")
        for name, entries in (("target", pool.target), ("capacity", pool.capacity)):
            if pool.unit == "group" and entries is not None:
                _check_multiple(f"pool.{name}", entries, "rollout.group_size", self.rollout.group_size)
        wanted = max(batch, pool.target or 0)
        if pool.capacity is not None and pool.capacity < wanted:
            raise ValueError(
                f"pool.capacity = {pool.capacity} is below what a draw waits for; the lowest is {wanted} "
                "(pool.batch_size, or pool.target where that is more)"
            )
        if self.sandbox.backend == "subprocess" and not self.sandbox.unsafe:
            raise ValueError(
                'sandbox.backend = "subprocess" isolates nothing: the model\'s code would run with your rights. '
                'Set sandbox.backend = "bwrap", or sandbox.unsafe = true if that is what you want'
            )
        if self.sandbox.backend == "docker" and self.sandbox.packages:
            raise ValueError(
                "sandbox.packages is for bubblewrap; a container has the packages of its image. Set sandbox.image, or "
                "leave it out for one with numpy and sympy"
            )
        if self.sandbox.backend != "docker" and (self.sandbox.image or self.sandbox.runtime):
            raise ValueError(
                f'sandbox.image and sandbox.runtime are for sandbox.backend = "docker", not {self.sandbox.backend!r}'
            )
        if self.clock.kind == "virtual" and self.engine.kind != "local":
            raise ValueError(
                f'clock.kind = "virtual" with engine.kind = {self.engine.kind!r}: servers work in real time. '
                'Set engine.kind = "local"'
            )
        check_sglang(self.sglang)
        if self.engine.kind == "sglang" and self.sglang.colocate and pool.policy != "sync":
            raise ValueError(
                f"sglang.colocate = true with pool.policy = {pool.policy!r}: servers that give their memory to the "
                'trainer can\'t generate meanwhile. Set pool.policy = "sync", or give the servers GPUs of their own'
            )
        return self


def _check_multiple(key: str, value: int, of_key: str, of: int) -> None:
    if value % of:
        below, above = value // of * of, (value // of + 1) * of
        closest = f"{below} and {above}" if below else f"{above}"
        raise ValueError(f"{key} = {value} is not divisible by {of_key} = {of}; closest: {closest}")
