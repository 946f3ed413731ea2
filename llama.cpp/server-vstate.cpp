#include "server-vstate.h"

#include <linux/bpf.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#define _Static_assert static_assert  // the header is C
#include "scx_vstate.h"

namespace
{

constexpr uint64_t NS_PER_S = 1000000000;

uint64_t now_ns()
{
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);  // the clock of bpf_ktime_get_ns()
	return uint64_t(t.tv_sec) * NS_PER_S + uint64_t(t.tv_nsec);
}

// Field 22 of /proc/self/stat; the second one, the name, may hold spaces and parentheses.
uint64_t start_ticks()
{
	std::ifstream file("/proc/self/stat");
	const std::string text{std::istreambuf_iterator<char>(file), {}};
	const size_t name_end = text.rfind(')');

	if (name_end == std::string::npos) {
		return 0;
	}
	std::istringstream fields(text.substr(name_end + 1));
	std::string word;
	for (int field = 3; field <= 22; field++) {
		fields >> word;
	}
	return strtoull(word.c_str(), nullptr, 10);
}

long bpf(bpf_cmd command, bpf_attr &attr)
{
	return syscall(SYS_bpf, command, &attr, sizeof(attr));
}

// The scheduler's map, as long as there is one, and what was written into it.
class phase_map
{
      public:
	static phase_map &get()
	{
		static phase_map map;
		return map;
	}

	void announce(const server_vstate_batch &batch)
	{
		if (!enabled) {
			return;
		}
		hint.sequence++;
		hint.prefill_total += batch.n_prefill;
		hint.decode_total += batch.n_decode;
		write(batch);
	}

	void idle(const server_vstate_batch &batch, bool computed)
	{
		if (!enabled) {
			return;
		}
		if (!computed) {
			hint.prefill_total -= batch.n_prefill;
			hint.decode_total -= batch.n_decode;
		}
		write({});
	}

      private:
	phase_map()
	{
		const char *value = getenv("LLAMA_VSTATE_PHASE_HINTS");
		enabled = value && !strcmp(value, "1");

		hint.abi_version = VSTATE_PHASE_ABI_VERSION;
		hint.writer_start_ticks = enabled ? start_ticks() : 0;
	}

	void write(const server_vstate_batch &batch)
	{
		hint.updated_ns = now_ns();
		hint.phase = batch.phase();
		hint.prefill_tokens = batch.n_prefill;
		hint.decode_tokens = batch.n_decode;
		hint.batch_tokens = batch.n_prefill + batch.n_decode;
		look_after();
		if (fd < 0) {
			return;
		}
		const uint32_t key = uint32_t(getpid());
		bpf_attr attr{};
		attr.map_fd = uint32_t(fd);
		attr.key = uint64_t(&key);
		attr.value = uint64_t(&hint);
		if (bpf(BPF_MAP_UPDATE_ELEM, attr)) {
			say(std::string("cannot write: ") + strerror(errno));
		}
	}

	// The scheduler may come, go and come again while the server runs: once a second, see
	// whether the map at its path is still the one that is open.
	void look_after()
	{
		if (looked_ns && hint.updated_ns - looked_ns < NS_PER_S) {
			return;
		}
		looked_ns = hint.updated_ns;

		struct stat found;
		if (stat(VSTATE_PHASE_MAP_PATH, &found)) {
			close_map();
			say(std::string("no map: ") + strerror(errno));
		} else if (fd < 0 || found.st_ino != inode) {
			close_map();
			open_map();
			inode = found.st_ino;
		}
	}

	void open_map()
	{
		bpf_attr attr{};
		attr.pathname = uint64_t(VSTATE_PHASE_MAP_PATH);
		const int file = int(bpf(BPF_OBJ_GET, attr));
		if (file < 0) {
			say(std::string("cannot open: ") + strerror(errno));
			return;
		}
		bpf_map_info info{};
		attr = {};
		attr.info.bpf_fd = uint32_t(file);
		attr.info.info_len = sizeof(info);
		attr.info.info = uint64_t(&info);
		// The kernel copies as many bytes as the map's own sizes say: never write into
		// another one.
		if (bpf(BPF_OBJ_GET_INFO_BY_FD, attr) || info.type != BPF_MAP_TYPE_HASH ||
		    info.key_size != sizeof(uint32_t) || info.value_size != sizeof(hint)) {
			close(file);
			say("not a map of phase hints, version 3 (type " +
			    std::to_string(info.type) + ", key " + std::to_string(info.key_size) +
			    " bytes, value " + std::to_string(info.value_size) + " bytes)");
			return;
		}
		fd = file;
		say("hints are written");
	}

	void close_map()
	{
		if (fd >= 0) {
			close(fd);
		}
		fd = -1;
	}

	// One line for each change of state, not for each batch.
	void say(const std::string &state)
	{
		if (state != said) {
			fprintf(stderr, "server-vstate: " VSTATE_PHASE_MAP_PATH ": %s\n",
				state.c_str());
		}
		said = state;
	}

	bool enabled = false;
	int fd = -1;
	ino_t inode = 0;
	uint64_t looked_ns = 0;
	std::string said;
	vstate_phase_hint hint{};
};

}  // namespace

uint32_t server_vstate_batch::phase() const
{
	if (n_prefill) {
		return n_decode ? VSTATE_PHASE_MIXED : VSTATE_PHASE_PREFILL;
	}
	return n_decode ? VSTATE_PHASE_DECODE : VSTATE_PHASE_IDLE;
}

server_vstate_scope::server_vstate_scope(const server_vstate_batch &batch) : batch(batch)
{
	phase_map::get().announce(batch);
}

server_vstate_scope::~server_vstate_scope()
{
	phase_map::get().idle(batch, computed);
}
