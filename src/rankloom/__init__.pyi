"""Made by docs/make_reference.py from the list in __init__.py, for editors and type checkers."""

from rankloom.base.cost import Bill as Bill
from rankloom.base.errors import BatchError as BatchError
from rankloom.base.errors import CollectiveMismatch as CollectiveMismatch
from rankloom.base.errors import CollectiveTimeout as CollectiveTimeout
from rankloom.base.errors import ConfigError as ConfigError
from rankloom.base.errors import DataError as DataError
from rankloom.base.errors import DeviceError as DeviceError
from rankloom.base.errors import LossError as LossError
from rankloom.base.errors import MeshError as MeshError
from rankloom.base.errors import ModelMismatch as ModelMismatch
from rankloom.base.errors import NonFinite as NonFinite
from rankloom.base.errors import NotContiguous as NotContiguous
from rankloom.base.errors import RankFailed as RankFailed
from rankloom.base.errors import RankloomError as RankloomError
from rankloom.base.errors import RankLost as RankLost
from rankloom.base.errors import ShapeMismatch as ShapeMismatch
from rankloom.base.errors import StorageError as StorageError
from rankloom.base.errors import UnitError as UnitError
from rankloom.base.errors import WrongResult as WrongResult
from rankloom.base.mesh import Mesh as Mesh
from rankloom.base.topology import Topology as Topology
from rankloom.comm.canonical import canonical_all_reduce as canonical_all_reduce
from rankloom.comm.choose import register_all_reduce as register_all_reduce
from rankloom.comm.compress import compressed_all_reduce as compressed_all_reduce
from rankloom.comm.ring import ring_all_reduce as ring_all_reduce
from rankloom.models.config import GPTConfig as GPTConfig
from rankloom.models.gpt import GPT as GPT
from rankloom.parallel.data import data_parallel as data_parallel
from rankloom.parallel.fully_shard import fully_shard as fully_shard
from rankloom.parallel.pipeline.build import pipeline as pipeline
from rankloom.parallel.tensor.apply import tensor_parallel as tensor_parallel
from rankloom.train.engine import Engine as Engine
from rankloom.train.engine import Report as Report
from rankloom.train.pipeline.pipe import Pipe as Pipe
from rankloom.train.precision import Precision as Precision
from rankloom.train.prepare import prepare as prepare
from rankloom.world.group import Group as Group
from rankloom.world.join import init as init
from rankloom.world.simulate import simulate as simulate
from rankloom.world.spawn import spawn as spawn
from rankloom.world.world import World as World

__version__: str
