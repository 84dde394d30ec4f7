"""What launchers leave in the environment, and what is made of it."""

import os

import pytest

import rankloom as rl
from rankloom.base.errors import ConfigError
from rankloom.world.launch import Place, debug_mode, find_place, job_name, meeting_point, tasks_per_node

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
ALONE = Place(launcher="alone", rank=0, size=1, local_rank=0, local_size=1)
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_ID": "0"}


def test_torchrun_says_who_this_is():
    assert find_place(TORCHRUN) == Place(launcher="torchrun", rank=5, size=8, local_rank=1, local_size=4, node=4)
    assert find_place(TORCHRUN | {"GROUP_RANK": "1"}).node == 1
    assert find_place({"RANK": "3", "WORLD_SIZE": "4"}) == Place("torchrun", 3, 4, 0, 1, node=3), "the others are taken to be elsewhere"


def test_slurm_says_who_this_is():
    assert find_place(SLURM) == Place(launcher="slurm", rank=3, size=4, local_rank=1, local_size=2)


@pytest.mark.parametrize(("text", "numbers"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2]), ("16(x1)", [16])])
def test_slurms_short_form_of_tasks_is_written_out(text, numbers):
    assert tasks_per_node(text) == numbers


@pytest.mark.parametrize("text", ["", "2(3)", "two", "2,", "2(x)", "-1"])
def test_tasks_that_are_no_numbers_are_named_with_the_variable(text):
    with pytest.raises(ConfigError, match=r"SLURM_TASKS_PER_NODE is .*expected numbers of tasks such as 2\(x3\),1"):
        find_place(SLURM | {"SLURM_TASKS_PER_NODE": text})


def test_slurm_says_how_many_share_this_node_when_nodes_differ():
    uneven = SLURM | {"SLURM_NTASKS": "7", "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
    uneven.pop("SLURM_NTASKS_PER_NODE")   # set only where the user has asked for a number per node
    place = find_place(uneven | {"SLURM_TASKS_PER_NODE": "2(x3),1"})
    assert (place.local_size, place.node) == (1, 3)
    assert find_place(uneven | {"SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "0"}).local_size == 2


def test_the_step_counts_and_not_the_whole_allocation():
    assert find_place(SLURM | {"SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "0"}).local_size == 3


def test_a_step_of_one_task_in_a_larger_job_is_alone():
    """salloc with use_interactive_step, and `srun --ntasks 1` of a job of four."""
    assert find_place(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}) == ALONE


def test_a_step_of_some_tasks_of_its_job_has_the_size_of_the_step():
    step = SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    assert find_place(step) == Place("slurm", 1, 2, 1, 2)
    with pytest.raises(ConfigError, match="does not fit SLURM_STEP_NUM_TASKS 3"):
        find_place(step | {"SLURM_STEP_NUM_TASKS": "3"})


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MEETING = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}


def test_open_mpi_says_who_this_is_where_a_meeting_point_is_set():
    place = find_place(OPEN_MPI | MEETING)
    assert (place.launcher, place.rank, place.size, place.local_rank, place.local_size) == ("mpirun", 3, 4, 1, 2)
    assert find_place(OPEN_MPI | MEETING | SLURM | {"SLURM_PROCID": "1"}) == place, "its daemons are a step of one task a node"
    assert find_place(OPEN_MPI | MEETING | TORCHRUN).launcher == "torchrun", "who sets RANK has decided"


def test_a_job_has_the_name_that_slurm_or_open_mpi_gives_it(monkeypatch):
    for name, value in (SLURM | {"SLURM_JOB_ID": "12", "PMIX_NAMESPACE": "77"}).items():
        monkeypatch.setenv(name, value)
    assert [job_name(find_place(env)) for env in (SLURM, OPEN_MPI | MEETING, TORCHRUN)] == ["12.0", "77", ""]


def test_ranks_of_one_host_under_mpirun_share_a_node_however_they_are_numbered(monkeypatch):
    nodes = set()
    for host in ("a", "a", "b"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        nodes.add(find_place(OPEN_MPI | MEETING).node)
    assert len(nodes) == 2


@pytest.mark.parametrize("missing", MEETING)
def test_mpirun_without_a_meeting_point_is_an_error_that_says_what_to_set_and_not_many_ranks_alone(missing):
    env = OPEN_MPI | {name: value for name, value in MEETING.items() if name != missing}
    with pytest.raises(ConfigError, match=rf"mpirun has started 4 processes, and {missing} must say where .* or start .* torchrun or srun"):
        find_place(env)


@pytest.mark.parametrize("env", [{"PMI_SIZE": "2", "PMI_RANK": "0"}, {"PMIX_RANK": "1"},
                                 SLURM | {"PMI_SIZE": "8"}])   # mpiexec of MPICH, whose proxies are a step of one task a node
def test_another_mpi_launcher_is_an_error_that_says_what_to_do_and_not_many_ranks_alone(env):
    with pytest.raises(ConfigError, match="start the ranks with torchrun or srun, or set RANK, WORLD_SIZE"):
        find_place(env)


def test_srun_is_slurms_also_where_it_speaks_to_mpi():
    assert find_place(SLURM | {"PMI_SIZE": "4", "PMI_RANK": "3", "PMIX_RANK": "3"}).launcher == "slurm"


@pytest.mark.parametrize("wrong", [{"SLURM_TASKS_PER_NODE": "2(x3)"}, {"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "2"},
                                   {"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "2"}])
def test_slurm_variables_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(ConfigError, match="does not fit SLURM_NTASKS 4, SLURM_NODEID . and SLURM_LOCALID"):
        find_place(SLURM | wrong)


def meets(monkeypatch, **env) -> tuple[str | None, str | None]:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (SLURM | env).items():
        monkeypatch.setenv(name, value)
    return meeting_point(find_place(SLURM | env))


@pytest.mark.parametrize(("lists", "host"), [({"SLURM_STEP_NODELIST": "n2,n3"}, "n2"), ({}, "n1")])
def test_ranks_of_a_step_meet_on_its_own_first_host_and_not_on_that_of_the_job(monkeypatch, lists, host):
    assert meets(monkeypatch, SLURM_JOB_NODELIST="n1,n2,n3", **lists)[0] == host


def test_where_slurms_own_tool_is_not_there_the_user_is_told_what_to_set(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="failed: No such file or directory; set MASTER_ADDR and MASTER_PORT yourself"):
        meets(monkeypatch, SLURM_JOB_NODELIST="n[1-2]")


def test_what_the_user_was_told_to_set_is_enough_without_slurms_own_tool(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    told = {"MASTER_ADDR": "n1.cluster", "MASTER_PORT": "29500"}
    assert meets(monkeypatch, SLURM_JOB_NODELIST="n[1-2]", **told) == ("n1.cluster", 29500)


def test_who_asks_for_the_meeting_point_leaves_the_environment_to_an_inner_launcher_as_it_was(monkeypatch):
    meets(monkeypatch, SLURM_JOB_NODELIST="n1,n2")
    assert not {"MASTER_ADDR", "MASTER_PORT"} & {*os.environ}


def test_ranks_of_one_node_need_no_name_to_meet(monkeypatch):
    together = {"SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    assert meets(monkeypatch, SLURM_JOB_NODELIST="n1", **together)[0] == "127.0.0.1"


def test_steps_of_one_job_meet_on_ports_of_their_own(monkeypatch):
    places = [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in ("7", "8") for step in ("0", "1")]
    assert len({meets(monkeypatch, SLURM_JOB_NODELIST="n1", **place)[1] for place in places}) == 4


def test_torchrun_inside_of_a_slurm_job_wins():
    assert find_place(TORCHRUN | SLURM).launcher == "torchrun"


@pytest.mark.parametrize("env", [
    {}, {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},                                          # a plain shell under salloc
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},                                              # an sbatch script itself
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"},                        # srun of one task
    {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},            # mpirun of one process
])
def test_without_a_launcher_there_is_one_rank_alone(env):
    assert find_place(env) == ALONE


@pytest.mark.parametrize("name", TORCHRUN)
def test_a_variable_that_is_no_number_is_named(name):
    with pytest.raises(ConfigError, match=f"environment variable {name} is 'two', expected a whole number"):
        find_place(TORCHRUN | {name: "two"})


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_half_a_launcher_is_an_error_and_not_a_run_on_one_rank(missing):
    with pytest.raises(ConfigError, match="RANK and WORLD_SIZE only one is set"):
        find_place({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize(("rank", "size"), [("8", "8"), ("-1", "8"), ("0", "0")])
def test_a_rank_that_is_not_among_the_ranks_is_refused(rank, size):
    with pytest.raises(ConfigError, match=f"rank {rank} of {size}"):
        find_place({"RANK": rank, "WORLD_SIZE": size})


@pytest.mark.parametrize(("local_rank", "local_size"), [("4", "4"), ("-1", "4"), ("0", "0")])
def test_a_rank_that_is_not_among_the_ranks_of_its_host_is_refused(local_rank, local_size):
    with pytest.raises(ConfigError, match=f"rank 5: LOCAL_RANK is {local_rank} and LOCAL_WORLD_SIZE is {local_size}; "):
        find_place(TORCHRUN | {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size})


@pytest.mark.parametrize(("value", "on"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_debug_mode_is_switched_by_one_variable(monkeypatch, value, on):
    monkeypatch.setenv("RANKLOOM_DEBUG", value)
    assert debug_mode() is on
    monkeypatch.delenv("RANKLOOM_DEBUG")
    assert debug_mode() is False


def test_reading_the_environment_takes_it_as_it_is_now(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert find_place().rank == 5


def test_a_number_of_ranks_stands_for_that_many_replicas():
    from rankloom.world.world import as_mesh

    assert as_mesh(3) == rl.Mesh(replicate=3)
    assert as_mesh(rl.Mesh(tensor=2)) == rl.Mesh(tensor=2)
