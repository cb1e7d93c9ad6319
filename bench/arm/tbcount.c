// QEMU TCG plugin: how often every translated block ran between two marks of the guest, with its
// instructions.
//
//   qemu-aarch64 -plugin tbcount.so,out=FILE PROGRAM
//
// Counting starts at the guest's `hint #112` and stops at `hint #113`; both are no-ops on every Arm CPU.
// When the guest exits, FILE gets a line a block: `T address executions opcode…`, numbers in hexadecimal but
// the second. One guest thread is assumed while counting.  The few prototypes of plugin API 1 (QEMU 6.0 to
// 8.1) are declared here, so that no header of QEMU is needed.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t PluginId;
struct qemu_info_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 1;

extern void qemu_plugin_register_vcpu_tb_trans_cb(PluginId, void (*)(PluginId, struct qemu_plugin_tb*));
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, int op, void* counter,
                                                     uint64_t add);
extern void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn*, void (*)(unsigned, void*),
                                                   int flags, void* data);
extern void qemu_plugin_register_atexit_cb(PluginId, void (*)(PluginId, void*), void* data);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);
extern uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb*);
extern struct qemu_plugin_insn* qemu_plugin_tb_get_insn(const struct qemu_plugin_tb*, size_t);
extern const void* qemu_plugin_insn_data(const struct qemu_plugin_insn*);

enum { kAddInline = 0, kNoRegisters = 0 };
enum { kHintMask = 0xfffff01f, kHint = 0xd503201f, kStart = 112, kStop = 113 };

struct Block {
  struct Block* next;
  uint64_t address, executions, at_start, counted;
  size_t length;
  uint32_t opcodes[];
};

static struct Block* blocks;
static const char* path = "tbcount.out";
static int counting;

static void start(unsigned cpu, void* data) {
  (void)cpu, (void)data;
  for (struct Block* b = blocks; b; b = b->next) b->at_start = b->executions;
  counting = 1;
}

static void stop(unsigned cpu, void* data) {
  (void)cpu, (void)data;
  for (struct Block* b = blocks; counting && b; b = b->next) b->counted += b->executions - b->at_start;
  counting = 0;
}

static void translate(PluginId id, struct qemu_plugin_tb* tb) {
  (void)id;
  const size_t length = qemu_plugin_tb_n_insns(tb);
  struct Block* block = calloc(1, sizeof *block + length * sizeof block->opcodes[0]);
  if (!block) abort();
  block->address = qemu_plugin_tb_vaddr(tb);
  block->length = length;
  for (size_t i = 0; i < length; ++i) {
    struct qemu_plugin_insn* instruction = qemu_plugin_tb_get_insn(tb, i);
    memcpy(&block->opcodes[i], qemu_plugin_insn_data(instruction), 4);
    if ((block->opcodes[i] & kHintMask) != kHint) continue;
    const unsigned hint = block->opcodes[i] >> 5 & 127;
    if (hint == kStart) qemu_plugin_register_vcpu_insn_exec_cb(instruction, start, kNoRegisters, NULL);
    if (hint == kStop) qemu_plugin_register_vcpu_insn_exec_cb(instruction, stop, kNoRegisters, NULL);
  }
  block->next = blocks;
  blocks = block;
  qemu_plugin_register_vcpu_tb_exec_inline(tb, kAddInline, &block->executions, 1);
}

static void finish(PluginId id, void* data) {
  (void)id, (void)data;
  FILE* file = fopen(path, "w");
  if (!file) {
    perror(path);
    return;
  }
  for (const struct Block* b = blocks; b; b = b->next) {
    if (!b->counted) continue;
    fprintf(file, "T %llx %llu", (unsigned long long)b->address, (unsigned long long)b->counted);
    for (size_t i = 0; i < b->length; ++i) fprintf(file, " %08x", b->opcodes[i]);
    fputc('\n', file);
  }
  fclose(file);
}

EXPORT int qemu_plugin_install(PluginId id, const struct qemu_info_t* info, int count, char** options) {
  (void)info;
  for (int i = 0; i < count; ++i) {
    if (strncmp(options[i], "out=", 4) != 0) return -1;
    path = strdup(options[i] + 4);
  }
  qemu_plugin_register_vcpu_tb_trans_cb(id, translate);
  qemu_plugin_register_atexit_cb(id, finish, NULL);
  return 0;
}
