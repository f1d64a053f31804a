// Which kernels ran, for how long and whose they are, seen by CUPTI in the solution's own process.
//
// Whose: when the driver loads a module, CUPTI shows its cubin. One that lies byte for byte in the
// solution's library, which the judge has built, is its own; every other one is foreign. A kernel
// that ran is own when its name is one of an own module's and of no foreign one's. So a kernel
// that bears the name of torch's is nobody's own.
//
// No streams of C++: some compilers link a libstdc++ of their own into every library, whose locales
// do not go with the one that torch has loaded.
//
// Built by the judge and loaded before the solution. A solution shares this process and could
// tamper with it, so what is said here may lower a verdict and never raise one.
//
//     launches_start  once; `cupti` is paths, one a line
//     launches_own    a library of the solution's, before it is loaded
//     launches_begin  from here on kernels are recorded
//     launches_end    waits for the device; the length of a report in JSON
//     launches_read   copies the last report

#include <cuda.h>
#include <cupti.h>
#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using std::string;

struct {  // entry points of libcupti and libcuda, found at run time
    decltype(&cuptiSubscribe) subscribe;
    decltype(&cuptiEnableCallback) enable_callback;
    decltype(&cuptiGetResultString) result_string;
    decltype(&cuptiActivityRegisterCallbacks) register_buffers;
    decltype(&cuptiActivityEnable) enable_activity;
    decltype(&cuptiActivityDisable) disable_activity;
    decltype(&cuptiActivityFlushAll) flush;
    decltype(&cuptiActivityGetNextRecord) next_record;
    decltype(&cuptiActivityGetNumDroppedRecords) num_dropped;
    decltype(&cuCtxSynchronize) synchronize;
} api;

struct Kernel {
    uint64_t records = 0, ns = 0;
};

constexpr size_t buffer_bytes = 1 << 20;
const CUpti_ActivityKind activities[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                         CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET};

CUpti_SubscriberHandle subscriber;
bool started;

std::mutex lock;  // guards what follows
std::vector<string> problems;
std::vector<string> own_libraries;  // their bytes
std::set<string> own_names, foreign_names;
uint64_t own_modules, foreign_modules, unread_modules;
std::map<string, Kernel> kernels;
std::vector<std::pair<uint64_t, uint64_t>> intervals;  // of kernels, copies and fills
uint64_t copies, copy_ns, dropped;
string reply;

void complain(const string& what, CUptiResult result) {  // with the lock held
    const char* text = nullptr;
    if (api.result_string) api.result_string(result, &text);
    problems.push_back(what + ": " + (text ? text : "error") + " (" + std::to_string(result) + ")");
}

bool check(const string& what, CUptiResult result) {
    if (result == CUPTI_SUCCESS) return true;
    std::lock_guard<std::mutex> hold(lock);
    complain(what, result);
    return false;
}

// ---- modules

// Adds the names of the functions in a cubin: the sections called .text.NAME. False when it is no
// whole cubin; nothing is read beside it, whatever it says.
bool add_functions(const char* cubin, size_t size, std::set<string>& names) {
    Elf64_Ehdr header;
    if (size < sizeof header || memcmp(cubin, ELFMAG, SELFMAG) != 0) return false;
    memcpy(&header, cubin, sizeof header);
    size_t table = header.e_shoff, count = header.e_shnum, text = header.e_shstrndx;
    if (table > size || count > (size - table) / sizeof(Elf64_Shdr) || text >= count) return false;
    std::vector<Elf64_Shdr> sections(count);
    memcpy(sections.data(), cubin + table, count * sizeof(Elf64_Shdr));
    size_t strings = sections[text].sh_offset, length = sections[text].sh_size;
    if (strings > size || length > size - strings) return false;
    bool whole = true;
    for (const Elf64_Shdr& section : sections) {
        whole = whole && section.sh_name < length;
        if (section.sh_name >= length) continue;
        const char* start = cubin + strings + section.sh_name;
        string name(start, strnlen(start, length - section.sh_name));
        if (name.rfind(".text.", 0) == 0) names.insert(name.substr(6));
    }
    return whole;
}

void loaded(const char* cubin, size_t size) {
    std::set<string> names;
    bool whole = cubin && add_functions(cubin, size, names);
    std::lock_guard<std::mutex> hold(lock);
    bool own = false;
    for (const string& bytes : own_libraries)  // a few bytes of a header lie in any library
        own = own || (whole && memmem(bytes.data(), bytes.size(), cubin, size));
    ++(own ? own_modules : foreign_modules);
    unread_modules += !whole;
    (own ? own_names : foreign_names).insert(names.begin(), names.end());
}

void CUPTIAPI on_resource(void*, CUpti_CallbackDomain domain, CUpti_CallbackId id,
                          const void* raw) {
    if (domain != CUPTI_CB_DOMAIN_RESOURCE || id != CUPTI_CBID_RESOURCE_MODULE_LOADED) return;
    auto* data = static_cast<const CUpti_ResourceData*>(raw);
    if (!data->resourceDescriptor) return;
    auto* module = static_cast<const CUpti_ModuleResourceData*>(data->resourceDescriptor);
    loaded(static_cast<const char*>(static_cast<const void*>(module->pCubin)), module->cubinSize);
}

// ---- what the device did

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* most) {
    *buffer = static_cast<uint8_t*>(aligned_alloc(64, buffer_bytes));
    *size = *buffer ? buffer_bytes : 0;
    *most = 0;
}

void ran(uint64_t start, uint64_t end) { intervals.emplace_back(start, end); }

void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t* buffer, size_t,
                          size_t valid) {
    std::lock_guard<std::mutex> hold(lock);
    CUpti_Activity* raw = nullptr;
    CUptiResult result = valid ? CUPTI_SUCCESS : CUPTI_ERROR_MAX_LIMIT_REACHED;
    while (valid && (result = api.next_record(buffer, valid, &raw)) == CUPTI_SUCCESS) {
        // Of these records only the beginning is read, which is the same in CUDA 12 and 13.
        if (raw->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            auto* item = reinterpret_cast<CUpti_ActivityKernel9*>(raw);
            Kernel& kernel = kernels[item->name ? item->name : "?"];
            ++kernel.records;
            kernel.ns += item->end - item->start;
            ran(item->start, item->end);
        } else if (raw->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            auto* item = reinterpret_cast<CUpti_ActivityMemcpy5*>(raw);
            ++copies;
            copy_ns += item->end - item->start;
            ran(item->start, item->end);
        } else if (raw->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
            auto* item = reinterpret_cast<CUpti_ActivityMemset4*>(raw);
            ++copies;
            copy_ns += item->end - item->start;
            ran(item->start, item->end);
        }
    }
    if (result != CUPTI_ERROR_MAX_LIMIT_REACHED) complain("cuptiActivityGetNextRecord", result);
    size_t lost = 0;
    if (api.num_dropped(context, stream, &lost) == CUPTI_SUCCESS) dropped += lost;
    free(buffer);
}

// ---- reports

string quoted(const string& text) {
    string out = "\"";
    for (unsigned char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        if (c >= 0x20 && c < 0x7f) out += char(c); else out += '?';
    }
    return out + '"';
}

string field(const char* name, uint64_t value) {
    return string(", \"") + name + "\": " + std::to_string(value);
}

// Nanoseconds in which anything ran: what ran at once counts once.
uint64_t busy_ns() {
    std::sort(intervals.begin(), intervals.end());
    uint64_t busy = 0, until = 0;
    for (auto& interval : intervals) {
        if (interval.second > until) busy += interval.second - std::max(interval.first, until);
        until = std::max(until, interval.second);
    }
    return busy;
}

void report() {  // with the lock held
    string list, told;
    for (auto& item : kernels) {
        bool own = own_names.count(item.first) && !foreign_names.count(item.first);
        list += string(list.empty() ? "" : ", ") + "{\"name\": " + quoted(item.first) +
                field("own", own) + field("records", item.second.records) +
                field("ns", item.second.ns) + "}";
    }
    std::vector<string> all = problems;
    if (unread_modules) all.push_back(std::to_string(unread_modules) + " modules are no cubins");
    for (auto& problem : all) told += (told.empty() ? "" : ", ") + quoted(problem);
    reply = "{\"kernels\": [" + list + "], \"problems\": [" + told + "]" +
            field("busy_ns", busy_ns()) + field("copy_ns", copy_ns) + field("copies", copies) +
            field("dropped", dropped) +
            field("own_modules", own_modules) + field("foreign_modules", foreign_modules) + "}";
}

template <class T>
bool find(void* library, const char* name, T& function) {
    function = reinterpret_cast<T>(dlsym(library, name));
    if (!function) problems.push_back(string("no function ") + name);
    return function;
}

void* open_first(const char* paths, int mode) {
    for (string rest = paths; !rest.empty();) {
        size_t end = std::min(rest.find('\n'), rest.size());
        if (void* library = dlopen(rest.substr(0, end).c_str(), mode)) return library;
        rest.erase(0, end + 1);
    }
    const char* why = dlerror();
    if (!(mode & RTLD_NOLOAD)) problems.push_back(string("cannot open: ") + (why ? why : "no path"));
    return nullptr;
}

bool find_all(const char* paths) {
    void* cupti = open_first(paths, RTLD_NOW | RTLD_NOLOAD);
    if (!cupti) cupti = open_first(paths, RTLD_NOW | RTLD_LOCAL);
    void* cuda = open_first("libcuda.so.1", RTLD_NOW);
    if (!cupti || !cuda) return false;
    return find(cupti, "cuptiSubscribe", api.subscribe) &&
           find(cupti, "cuptiEnableCallback", api.enable_callback) &&
           find(cupti, "cuptiGetResultString", api.result_string) &&
           find(cupti, "cuptiActivityRegisterCallbacks", api.register_buffers) &&
           find(cupti, "cuptiActivityEnable", api.enable_activity) &&
           find(cupti, "cuptiActivityDisable", api.disable_activity) &&
           find(cupti, "cuptiActivityFlushAll", api.flush) &&
           find(cupti, "cuptiActivityGetNextRecord", api.next_record) &&
           find(cupti, "cuptiActivityGetNumDroppedRecords", api.num_dropped) &&
           find(cuda, "cuCtxSynchronize", api.synchronize);
}

bool subscribe() {
    return check("cuptiSubscribe", api.subscribe(&subscriber, on_resource, nullptr)) &&
           check("cuptiEnableCallback",
                 api.enable_callback(1, subscriber, CUPTI_CB_DOMAIN_RESOURCE,
                                     CUPTI_CBID_RESOURCE_MODULE_LOADED)) &&
           check("cuptiActivityRegisterCallbacks",
                 api.register_buffers(give_buffer, take_buffer));
}

}  // namespace

extern "C" {

int launches_own(const char* path) {
    FILE* file = fopen(path, "rb");
    if (!file) return 1;
    string bytes;
    char piece[1 << 16];
    while (size_t got = fread(piece, 1, sizeof piece, file)) bytes.append(piece, got);
    bool failed = ferror(file);
    fclose(file);
    if (failed) return 1;
    std::lock_guard<std::mutex> hold(lock);
    own_libraries.push_back(bytes);
    return 0;
}

int launches_start(const char* cupti) {
    started = find_all(cupti) && subscribe();
    return started ? 0 : 1;
}

void launches_begin() {
    if (!started) return;
    api.synchronize();
    for (auto kind : activities) check("cuptiActivityEnable", api.enable_activity(kind));
    api.flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    std::lock_guard<std::mutex> hold(lock);
    kernels.clear();
    intervals.clear();
    copies = copy_ns = dropped = 0;
}

long launches_end() {
    if (started) {
        api.synchronize();
        check("cuptiActivityFlushAll", api.flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));
        for (auto kind : activities) check("cuptiActivityDisable", api.disable_activity(kind));
    }
    std::lock_guard<std::mutex> hold(lock);
    report();
    return long(reply.size());
}

long launches_read(char* buffer, long size) {
    std::lock_guard<std::mutex> hold(lock);
    if (size < long(reply.size())) return -1;
    memcpy(buffer, reply.data(), reply.size());
    return long(reply.size());
}
}
