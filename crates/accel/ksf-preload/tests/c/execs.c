/* Starts a program in the way it is told to, with an environment that has lost the library's variables; that prints those
 * and one more.
 *
 *   execs WAY self|other [UID]     starts itself or /bin/sh, as that user
 *   execs show                     prints */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static char script[] = "for name in LD_PRELOAD KSF_ACCEL KSF_ACCEL_PORTS OTHER; do env | grep \"^$name=\"; done; true";
static const char *names[] = { "LD_PRELOAD", "KSF_ACCEL", "KSF_ACCEL_PORTS", "OTHER" };

int main(int count, char **arguments)
{
	const char *way = count > 1 ? arguments[1] : "";
	int self = count > 2 && strcmp(arguments[2], "self") == 0, status;
	int uid = count > 3 ? atoi(arguments[3]) : 0;
	/* More than the registers hold: execl and its like must find those on the stack. */
	char *list[] = { "sh", self ? "show" : "-c", script, "a", "b", "c", "d", "e", "f", "g", "h", NULL };
	char *cleaned[] = { "OTHER=1", "PATH=/usr/bin:/bin", NULL, NULL };
	/* Its name is found by PATH. */
	char *path = self ? "/proc/self/exe" : "/bin/sh", *name = self ? "execs" : "sh";
	int file = open(path, O_PATH);
	pid_t child;

#define IS(word) (strcmp(way, word) == 0)
#define LIST "sh", list[1], script, "a", "b", "c", "d", "e", "f", "g", "h", NULL
	if (IS("show")) {
		for (int i = 0; i < 4; i++)
			if (getenv(names[i]))
				printf("%s=%s\n", names[i], getenv(names[i]));
		return 0;
	}
	if (uid && !IS("vfork") && syscall(SYS_setresuid, uid, uid, uid) != 0)
		return 1;
	if (IS("preload"))
		cleaned[2] = "LD_PRELOAD=/lib/other.so";
	else if (IS("without"))
		cleaned[2] = "KSF_ACCEL=";
	if (IS("execve") || IS("preload") || IS("without"))
		execve(path, list, cleaned);
	else if (IS("execvpe"))
		execvpe(name, list, cleaned);
	else if (IS("execle"))
		execle(path, LIST, cleaned);
	else if (IS("fexecve"))
		fexecve(file, list, cleaned);
	else if (IS("execveat"))
		execveat(file, "", list, cleaned, AT_EMPTY_PATH);
	else if (IS("missing"))
		execve("/nowhere/at/all", list, cleaned);
	else if (IS("posix_spawn") || IS("posix_spawnp")) {
		if ((IS("posix_spawn") ? posix_spawn(&child, path, NULL, NULL, list, cleaned) :
					 posix_spawnp(&child, name, NULL, NULL, list, cleaned)) != 0)
			return 1;
		return waitpid(child, &status, 0) < 0 || status;
	} else if (IS("vfork")) {
		child = vfork();
		if (child == 0) {
			if (uid)
				syscall(SYS_setresuid, uid, uid, uid);
			execve(path, list, cleaned);
			_exit(1);
		}
		return waitpid(child, &status, 0) < 0 || status;
	} else if (IS("system")) {
		environ = cleaned;
		return system(script);
	} else {
		/* These look for a name in the environment that they pass. */
		char found[4096];
		snprintf(found, sizeof(found), "PATH=%s", getenv("PATH"));
		cleaned[1] = found;
		environ = cleaned;
		if (IS("execv"))
			execv(path, list);
		else if (IS("execvp"))
			execvp(name, list);
		else if (IS("execl"))
			execl(path, LIST);
		else if (IS("execlp"))
			execlp(name, LIST);
	}
	puts(strerrorname_np(errno));
	return 0;
}
