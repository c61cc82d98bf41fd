// Python binding of the trace replays.
#include "optimal.h"
#include "py_buffers.h"

namespace py = pybind11;

namespace kvcache {

void check_requests(const Buffer& starts, const Buffer& blocks, std::size_t unique, std::size_t first,
                    std::size_t end) {
    expect(starts.integers("lq", 8, "int64") > end, "more requests than the trace has");
    const std::size_t accesses = blocks.integers("i", 4, "int32");
    const std::int64_t* begins = reinterpret_cast<const std::int64_t*>(starts.data());
    const std::int32_t* numbers = reinterpret_cast<const std::int32_t*>(blocks.data());
    for (std::size_t r = first; r < end; ++r) {
        expect(0 <= begins[r] && begins[r] <= begins[r + 1] && static_cast<std::size_t>(begins[r + 1]) <= accesses,
               "starts: expected ascending positions within the blocks");
    }
    for (std::int64_t i = begins[first]; i < begins[end]; ++i) {
        expect(numbers[i] >= 0 && static_cast<std::size_t>(numbers[i]) < unique,
               "a block number outside the trace's blocks");
    }
}

namespace {

void py_replay_optimal(const py::object& starts, const py::object& blocks, std::size_t unique, std::size_t capacity,
                       const py::object& hits) {
    const Buffer begins(starts, PyBUF_FORMAT), numbers(blocks, PyBUF_FORMAT), out(hits, PyBUF_FORMAT | PyBUF_WRITABLE);
    const std::size_t requests = out.integers("i", 4, "int32");
    check_requests(begins, numbers, unique, 0, requests);
    expect(capacity > 0, "capacity = 0: expected at least one block");
    const Chains chains{reinterpret_cast<const std::int64_t*>(begins.data()),
                        reinterpret_cast<const std::int32_t*>(numbers.data()), requests, unique};
    py::gil_scoped_release unlocked;
    replay_optimal(chains, capacity, reinterpret_cast<std::int32_t*>(out.data()));
}

}  // namespace

void bind_replay(py::module_& module) {
    module.def("replay_optimal", &py_replay_optimal, py::arg("starts"), py::arg("blocks"), py::arg("unique"),
               py::arg("capacity"), py::arg("hits"),
               "Replay a trace with Belady's policy; write how many of each request's leading blocks were resident.");
}

}  // namespace kvcache
