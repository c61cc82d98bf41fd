// The players of traces, for Python.
#include "classics.h"
#include "objects.h"

namespace py = pybind11;

namespace kvcache {

void check_chains(const Buffer& starts, const Buffer& blocks, std::size_t unique, std::size_t first, std::size_t end) {
    expect(starts.integers("lq", 8, "int64") > end, "requests to play: more than there are");
    const std::size_t accesses = blocks.integers("i", 4, "int32");
    const std::int64_t* begins = reinterpret_cast<const std::int64_t*>(starts.data());
    const std::int32_t* numbers = reinterpret_cast<const std::int32_t*>(blocks.data());
    for (std::size_t r = first; r < end; ++r) {
        expect(0 <= begins[r] && begins[r] <= begins[r + 1] && static_cast<std::size_t>(begins[r + 1]) <= accesses,
               "where requests begin: expected ascending positions within the blocks");
    }
    for (std::int64_t i = begins[first]; i < begins[end]; ++i) {
        expect(numbers[i] >= 0 && static_cast<std::size_t>(numbers[i]) < unique, "a block that nothing is known of");
    }
}

namespace {

bool play_one(const std::string& policy, const py::object& starts, const py::object& blocks, std::size_t unique,
              std::size_t capacity, const py::object& hits) {
    const Buffer begins(starts, PyBUF_FORMAT), numbers(blocks, PyBUF_FORMAT), out(hits, PyBUF_FORMAT | PyBUF_WRITABLE);
    const std::size_t requests = out.integers("i", 4, "int32");
    check_chains(begins, numbers, unique, 0, requests);
    expect(capacity > 0, "no room: expected a capacity of one block at least");
    const Chains chains{reinterpret_cast<const std::int64_t*>(begins.data()),
                        reinterpret_cast<const std::int32_t*>(numbers.data()), requests, unique};
    py::gil_scoped_release unlocked;
    return play_classic(policy, chains, capacity, reinterpret_cast<std::int32_t*>(out.data()));
}

}  // namespace

void bind_play(py::module_& module) {
    module.def("play_classic", &play_one, py::arg("policy"), py::arg("starts"), py::arg("blocks"), py::arg("unique"),
               py::arg("capacity"), py::arg("hits"),
               "Writes how many of each request's first blocks were there; false where there is no such policy.");
}

}  // namespace kvcache
