"""``hotset.Model``: a network, its loss and its optimizer, trained and evaluated in one call each.

    train ──> RunState ──> training_step ──> Sink ──> CallbackList
              run_state.py   step.py         device   callbacks.py

An epoch is ``steps_in_epoch`` steps: those of a pass, or the sink's size. With sinking an epoch is one sink;
without, each step is a sink of its own, and nothing is captured. A loader without a length ends an epoch
itself. So the results are the same with sinking and without, and only how often the host hears of the steps
differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from hotset.device.queue import DeviceQueue
from hotset.device.sink import Sink, data_sink
from hotset.device.trees import map_tensors
from hotset.errors import ArgumentError, StateError
from hotset.train import checkpoint
from hotset.train.callbacks import CallbackList, bars, positive
from hotset.train.epochs import PassOver, batches_of, length_of, queue_of, source_of, steps_of_sink
from hotset.train.metrics import checked_metrics, evaluate
from hotset.train.run_state import RunState
from hotset.train.step import in_mode, training_step

__all__ = ["Model"]


class _Left(NamedTuple):
    """What a run that was interrupted leaves for the next one.

    Attributes:
        loader: whose position it is; None for a checkpoint's, which fits any loader of the same make.
        content: of a checkpoint: "run", "data", "callbacks", and "random" if that is to be put back.
    """

    loader: Any
    content: dict[str, Any]


class Model:
    """A network with its loss and optimizer: ``train``, ``eval``, ``fit`` and ``predict``.

    Batches are ``(input, ..., label)``, as lists or tuples, or dicts with a ``"label"``: the network is given
    all but the label, by place or by name, and the loss is ``loss_fn(output, label)``. With ``loss_fn=None``
    the network is given the whole batch and returns the loss itself.

    Args:
        network: a module; it is moved to the device.
        loss_fn: gives the loss, one number in a tensor.
        optimizer: over the network's parameters; None if the model is not to be trained.
        metrics: by name: torchmetrics objects, or whatever has ``update(output, label)``, ``compute()`` and
            ``reset()``; :class:`hotset.Accuracy` and :class:`hotset.Loss`.
        device: where to compute. None: where the network is if that is an accelerator, else the machine's
            accelerator if there is one, else the CPU.

    Attributes:
        steps: training steps that were done so far, over all calls.

    Raises:
        ArgumentError: an argument is not valid.

    Note:
        After Mindspore's ``Model``, whose rules of sinking are kept; the steps that callbacks are told of are
        the true ones here on every device.

    Example:
        >>> from hotset.train.metrics import Accuracy
        >>> network = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        >>> model = Model(network, torch.nn.CrossEntropyLoss(), optimizer, {"accuracy": Accuracy()})
        >>> inputs = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> batches = [(inputs, torch.tensor([0, 1]))]
        >>> model.train(2, batches, dataset_sink_mode=True, sink_size=50)
        >>> model.steps, model.eval(batches), model.predict(inputs).argmax(1).tolist()
        (100, {'accuracy': 1.0}, [0, 1])
    """

    def __init__(
        self,
        network: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: Any = None,
        metrics: Any = None,
        *,
        device: Any = None,
    ) -> None:
        if not isinstance(network, nn.Module):
            raise ArgumentError(f"network must be a torch.nn.Module, got {network!r}.")
        if loss_fn is not None and not callable(loss_fn):
            raise ArgumentError(
                f"loss_fn must be callable, got {loss_fn!r}; give a function of (output, label)."
            )
        if optimizer is not None and not all(hasattr(optimizer, name) for name in ("zero_grad", "step")):
            raise ArgumentError(
                f"optimizer must have zero_grad() and step(), got {optimizer!r}; give one of torch.optim."
            )
        self.device = _device_of(network, device)
        self.network = network.to(self.device)
        self.loss_fn = loss_fn.to(self.device) if isinstance(loss_fn, nn.Module) else loss_fn
        self.optimizer = optimizer
        self.metrics = checked_metrics(metrics)
        self.steps = 0
        self._left: _Left | None = None

    # ---- training ------------------------------------------------------------------------------------

    def train(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        *,
        resume: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> None:
        """Train for ``epoch`` epochs.

        ==============================  ===================================  ===============================
        ..                              an epoch                             the host hears of it
        ==============================  ===================================  ===============================
        without sinking                 one pass over the data               after each step
        sinking, ``sink_size=-1``       one pass over the data               after each epoch
        sinking, ``sink_size=K``        K steps; the next epoch goes on      after each epoch
                                        where this one stopped in the data
        ==============================  ===================================  ===============================

        A call that an exception ended, Ctrl-C say, is taken up by the next one with the same
        ``train_dataset``: the epochs that were done count, and it goes on after the last step. (If the loader
        cannot say where it stands, with the beginning of that epoch.) Otherwise a call begins a new pass.

        Args:
            epoch: how many, at least 1, those of the run that goes on included.
            train_dataset: a loader: hotset's, torch's, a :class:`hotset.DeviceQueue`, any iterable.
            callbacks: a :class:`hotset.Callback`, or a list of them.
            dataset_sink_mode: whether to sink. The results are the same.
            sink_size: steps of an epoch with sinking; ignored without.
            resume: a checkpoint to go on from, bit for bit as if the run had not been interrupted. Give the
                same arguments as to that run, and objects made alike; their states are put back.
            progress: whether to show a bar, where ``sys.stdout`` is a terminal.

        Raises:
            ArgumentError: an argument is not valid; the loader is empty; a batch has no label.
            StateError: the checkpoint is damaged, or of another model or dataset.
            Exception: whatever the loader, the network or a callback raises; nothing is left running.

        Example:
            >>> network = nn.Linear(1, 1)
            >>> model = Model(network, nn.MSELoss(), torch.optim.SGD(network.parameters()))
            >>> model.train(2, [(torch.ones(4, 1), torch.ones(4, 1))] * 3)
            >>> model.steps
            6
        """
        self._train(epoch, train_dataset, None, callbacks, dataset_sink_mode, sink_size, resume, progress)

    def fit(
        self,
        epoch: int,
        train_dataset: Any,
        valid_dataset: Any = None,
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        *,
        resume: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> None:
        """Train as :meth:`train` does, and evaluate on ``valid_dataset`` after each epoch.

        Callbacks find the values in ``run.metrics``, in ``on_eval_end`` and ``on_epoch_end``.

        Raises:
            as :meth:`train` and :meth:`eval`.
        """
        if valid_dataset is not None:
            self._check_metrics()
        self._train(
            epoch, train_dataset, valid_dataset, callbacks, dataset_sink_mode, sink_size, resume, progress
        )

    def _train(
        self,
        epoch: int,
        loader: Any,
        valid: Any,
        callbacks: Any,
        sinking: bool,
        sink_size: int,
        resume: str | os.PathLike[str] | None,
        progress: bool,
    ) -> None:
        run = RunState(self, loader, positive(epoch, "epoch"), step=self.steps)
        if self.optimizer is None:
            raise ArgumentError("this Model has no optimizer to train with; give it one.")
        size = steps_of_sink(sinking, sink_size, loader)
        with ExitStack() as held:
            tell = CallbackList(callbacks, first=bars(progress, held))
            queue = queue_of(loader, self.device)
            held.callback(queue.close if queue is not loader else queue.end_pass)
            run.steps_in_epoch = size if size is not None else length_of(queue)
            sink = self._sink(queue if size is not None else source_of(queue), sinking)
            held.enter_context(sink)
            if resume is not None:
                self.load_checkpoint(resume)
            held.enter_context(in_mode(self.network, training=True))
            validate = (lambda: self._evaluate(valid, run, tell)) if valid is not None else None
            with self._leaving(run, sink, tell) as left:
                self._begin(run, sink, tell, left)
                _train_epochs(run, sink, tell, sinking=sinking, evaluate=validate)
                tell("on_train_end", run)

    def _sink(self, source: DeviceQueue[Any], sinking: bool) -> Sink:
        step = training_step(self.network, self.loss_fn, self.optimizer)
        return data_sink(step, source, graph="auto" if sinking else False, outputs="all")

    def _begin(self, run: RunState, sink: Sink, tell: CallbackList, left: _Left | None) -> None:
        """Tell that training begins, where the last run stopped if it left something for this loader."""
        fits = left is not None and (left.loader is None or left.loader is run.loader)
        content = left.content if left is not None and fits else None
        if content is not None:
            run.go_to(content["run"])
            run.data = content["data"]
        run.content = lambda: self._checkpoint(run, sink, tell)
        tell("on_train_begin", run)
        if content is not None:
            tell.load(content["callbacks"])
            # Last: whatever was drawn on the way here does not count.
            if "random" in content:
                checkpoint.put_random_states(content["random"], self.device)

    @contextmanager
    def _leaving(self, run: RunState, sink: Sink, tell: CallbackList) -> Iterator[_Left | None]:
        """Gives what the last run left; keeps steps counted, and what an exception has this one leave."""
        left, self._left = self._left, None
        try:
            yield left
        except BaseException as error:
            run.done = run.before + sink.steps
            if run.done > self.steps:
                self._left = _Left(run.loader, _position(run, sink, tell))
            elif not isinstance(error, StateError):  # no step was done; a bad state is not kept
                self._left = left
            raise
        finally:
            self.steps = run.done

    # ---- checkpoints ---------------------------------------------------------------------------------

    def _checkpoint(self, run: RunState, sink: Sink, tell: CallbackList) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "run": run.position(),
            "data": run.data or sink.state_dict(),
            "callbacks": tell.states(),
            "random": checkpoint.random_states(self.device),
        }

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Put network and optimizer to where a checkpoint has them; the next :meth:`train` goes on from it.

        Written by :class:`hotset.ModelCheckpoint`, or ``run.save_checkpoint(path)`` in a callback. Where it
        stands in the data, the callbacks' states and those of all random number generators are put back when
        training begins.

        Raises:
            StateError: it is damaged, or of another network or optimizer.
            OSError: there is no such file, or it cannot be read.
        """
        content = checkpoint.read(path)
        try:
            self.network.load_state_dict(content["network"])
            if self.optimizer is not None:
                self.optimizer.load_state_dict(content["optimizer"])
                self._match_device()
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise StateError(f"{path} does not fit this network or optimizer: {error}") from error
        run = RunState(self, None)
        run.go_to(content["run"])
        self.steps = run.done
        self._left = _Left(None, content)

    def _match_device(self) -> None:
        """On a GPU a graph wants optimizers to count their steps there; the CPU refuses such ones."""
        for group in self.optimizer.param_groups if self.device.type == "cpu" else []:
            if group.get("capturable"):
                group["capturable"] = False

    # ---- use -----------------------------------------------------------------------------------------

    def eval(self, dataset: Any, callbacks: Any = None) -> dict[str, Any]:
        """Evaluate on one pass over a loader: each metric's value, by name.

        The network is in evaluation mode meanwhile, and no gradients are kept.

        Args:
            dataset: any loader, as for :meth:`train`.
            callbacks: are told of ``on_eval_begin`` and ``on_eval_end``.

        Raises:
            ArgumentError: the model has no metrics, or one does not fit the network; the loader is empty.

        Example:
            >>> from hotset.train.metrics import Loss
            >>> model = Model(nn.Identity(), nn.MSELoss(), metrics={"loss": Loss()})
            >>> model.eval([(torch.ones(3, 1), torch.zeros(3, 1))])
            {'loss': 1.0}
        """
        self._check_metrics()
        run = RunState(self, dataset, step=self.steps)
        return self._evaluate(dataset, run, CallbackList(callbacks))

    def predict(self, *inputs: Any) -> Any:
        """The network's output for these inputs, in evaluation mode and without gradients.

        Args:
            inputs: tensors, or trees of them; they are brought to the device.

        Example:
            >>> Model(nn.Identity()).predict(torch.tensor([1.0, 2.0])).tolist()
            [1.0, 2.0]
        """
        moved = map_tensors(lambda tensor: tensor.to(self.device), inputs)
        with in_mode(self.network, training=False), torch.no_grad():
            return self.network(*moved)

    def _evaluate(self, dataset: Any, run: RunState, tell: CallbackList) -> dict[str, Any]:
        queue = queue_of(dataset, self.device)
        length_of(queue)
        tell("on_eval_begin", run)
        with in_mode(self.network, training=False), torch.no_grad():
            run.metrics = evaluate(self.network, self.loss_fn, self.metrics, batches_of(queue), self.device)
        tell("on_eval_end", run)
        return run.metrics

    def _check_metrics(self) -> None:
        if not self.metrics:
            raise ArgumentError(
                'this Model has no metrics to evaluate; give it some, as in metrics={"loss": hotset.Loss()}.'
            )


def _train_epochs(
    run: RunState,
    sink: Sink,
    tell: CallbackList,
    *,
    sinking: bool,
    evaluate: Callable[[], dict[str, Any]] | None,
) -> None:
    """Train from where the run stands to the end of its last epoch, or until a stop is requested.

    With ``sinking`` an epoch is one sink; ``evaluate`` is called at each epoch's end, and gives the metrics.
    """
    while run.epochs_done < run.epochs and not run.stopping:
        run.epoch = run.epochs_done + 1
        with _told_again(run):
            tell("on_epoch_begin", run)
        if not (run.trained or _train_epoch(run, sink, tell, sinking)):
            return
        run.trained = True
        if evaluate is not None:
            run.metrics = evaluate()
        # Before the callbacks: a checkpoint that one of them writes is of an epoch that is over.
        run.epochs_done, run.trained = run.epoch, False
        tell("on_epoch_end", run)
        run.epoch_began = run.step


@contextmanager
def _told_again(run: RunState) -> Iterator[None]:
    """Callbacks are told again of an epoch that goes on: what they drew counted when it began."""
    random = checkpoint.random_states(run.model.device) if run.trained or run.step_in_epoch else None
    yield
    if random is not None:
        checkpoint.put_random_states(random, run.model.device)


def _advance(run: RunState, sink: Sink, steps: int) -> torch.Tensor:
    """Run steps, from where a run stopped if this one goes on from it; returns their losses, ``(steps,)``.

    Only now, as a loader that is told where to go on does so in its next pass, and there may be no step left.
    """
    if run.data is not None:
        device = run.model.device
        # An evaluation and callbacks may have drawn since the run stood there: their draws count.
        random = checkpoint.random_states(device)
        sink.load_state_dict(checkpoint.with_random_states(run.data, random))
        checkpoint.put_random_states(random, device)
        run.data = None
        run.before = run.done - sink.steps
    losses: torch.Tensor = sink(steps)
    return losses


def _train_epoch(run: RunState, sink: Sink, tell: CallbackList, sinking: bool) -> bool:
    """Train the rest of an epoch; False if a stop has cut it short."""
    whole = run.steps_in_epoch
    while whole is None or run.step_in_epoch < whole:
        try:
            losses = _advance(run, sink, whole - run.step_in_epoch if sinking and whole is not None else 1)
        except PassOver:
            if run.step_in_epoch == 0:
                raise ArgumentError(
                    "the loader gave no batch in a whole pass: it is empty, or an iterator that is used up; "
                    "give one that can be iterated over again."
                ) from None
            return True
        run.take(losses)
        tell.steps(run)
        tell("on_sink_end", run)
        if run.stopping:
            return run.step_in_epoch == whole
    return True


def _position(run: RunState, sink: Sink, tell: CallbackList) -> dict[str, Any]:
    """What the next run needs to take this one up, in the same process."""
    position = run.position()
    try:
        data = run.data or sink.state_dict()
    except StateError:  # the loader cannot say: the epoch's beginning is the last place that is known
        if not run.trained:
            position["step_in_epoch"] = 0
        return {"run": position, "data": None, "callbacks": tell.states()}
    random = checkpoint.random_states(run.model.device)
    return {"run": position, "data": data, "callbacks": tell.states(), "random": random}


def _device_of(network: nn.Module, device: Any) -> torch.device:
    if device is None:
        places = (tensor.device for tensor in chain(network.parameters(), network.buffers()))
        device = next((place for place in places if place.type not in ("cpu", "meta")), None)
    # The queue decides where the batches go.
    return DeviceQueue([], device=device).device
