/* Starts /usr/bin/env in the way it is told to, with an environment that has lost the library's variables; prints those
 * and one more. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static char script[] = "for name in LD_PRELOAD KSF_ACCEL KSF_ACCEL_PORTS OTHER; do env | grep \"^$name=\"; done; true";

int main(int count, char **arguments)
{
	/* More than the registers hold: execl and its like must find those on the stack. */
	char *list[] = { "sh", "-c", script, "a", "b", "c", "d", "e", "f", "g", "h", NULL };
	char *cleaned[] = { "OTHER=1", "PATH=/usr/bin:/bin", NULL, NULL };
	const char *way = count > 1 ? arguments[1] : "";
	int shell = open("/bin/sh", O_PATH), status;
	pid_t child;

#define IS(word) (strcmp(way, word) == 0)
#define LIST "sh", "-c", script, "a", "b", "c", "d", "e", "f", "g", "h", NULL
	if (IS("preload"))
		cleaned[2] = "LD_PRELOAD=/lib/other.so";
	else if (IS("without"))
		cleaned[2] = "KSF_ACCEL=";
	if (IS("execve") || IS("preload") || IS("without"))
		execve("/bin/sh", list, cleaned);
	else if (IS("execvpe"))
		execvpe("sh", list, cleaned);
	else if (IS("execle"))
		execle("/bin/sh", LIST, cleaned);
	else if (IS("fexecve"))
		fexecve(shell, list, cleaned);
	else if (IS("execveat"))
		execveat(shell, "", list, cleaned, AT_EMPTY_PATH);
	else if (IS("missing"))
		execve("/nowhere/at/all", list, cleaned);
	else if (IS("posix_spawn") || IS("posix_spawnp")) {
		if ((IS("posix_spawn") ? posix_spawn(&child, "/bin/sh", NULL, NULL, list, cleaned) :
					 posix_spawnp(&child, "sh", NULL, NULL, list, cleaned)) != 0)
			return 1;
		return waitpid(child, &status, 0) < 0 || status;
	} else if (IS("vfork")) {
		child = vfork();
		if (child == 0) {
			execve("/bin/sh", list, cleaned);
			_exit(1);
		}
		return waitpid(child, &status, 0) < 0 || status;
	} else {
		environ = cleaned;
		if (IS("execv"))
			execv("/bin/sh", list);
		else if (IS("execvp"))
			execvp("sh", list);
		else if (IS("execl"))
			execl("/bin/sh", LIST);
		else if (IS("execlp"))
			execlp("sh", LIST);
	}
	puts(strerrorname_np(errno));
	return 0;
}
