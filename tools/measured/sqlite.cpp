// SQLite with its defences up: untrusted schemas, no writes, bounds on lengths.
#include "tools/measured/sqlite.hpp"

#include "planner/base/error.hpp"

#include <sqlite3.h>

#include <algorithm>
#include <filesystem>

namespace moe::tools {

namespace {

constexpr int most_text_bytes = 1 << 22, most_columns = 500, most_expression_depth = 50, most_sql_bytes = 1 << 20;

// The name as SQL writes it, whatever it holds.
std::string sql_name(const std::string& name) {
    std::string text = "\"";
    for (const char c : name) text += c == '"' ? std::string("\"\"") : std::string(1, c);
    return text + "\"";
}

} // namespace

struct SqliteFile::Handle {
    sqlite3* database = nullptr;
    std::string path;
    std::vector<std::string> tables;
    ~Handle() { sqlite3_close(database); }
};

struct SqliteRows::Statement {
    sqlite3* database = nullptr;
    sqlite3_stmt* statement = nullptr;
    std::string path, table;
    std::vector<std::string> columns;
    ~Statement() { sqlite3_finalize(statement); }
};

namespace {

sqlite3_stmt* prepared(sqlite3* database, const std::string& path, const std::string& sql) {
    sqlite3_stmt* statement = nullptr;
    if (sqlite3_prepare_v2(database, sql.c_str(), -1, &statement, nullptr) != SQLITE_OK)
        refuse("{}: not a database that can be read: {}", path, sqlite3_errmsg(database));
    return statement;
}

// First column of all rows.
std::vector<std::string> column_of(sqlite3* database, const std::string& path, const std::string& sql, int column) {
    sqlite3_stmt* const statement = prepared(database, path, sql);
    const std::unique_ptr<sqlite3_stmt, int (*)(sqlite3_stmt*)> owner(statement, sqlite3_finalize);
    std::vector<std::string> values;
    int state = sqlite3_step(statement);
    for (; state == SQLITE_ROW && values.size() < 100'000; state = sqlite3_step(statement))
        if (const unsigned char* text = sqlite3_column_text(statement, column))
            values.emplace_back(reinterpret_cast<const char*>(text));
    if (state != SQLITE_DONE && state != SQLITE_ROW)
        refuse("{}: not a database that can be read: {}", path, sqlite3_errmsg(database));
    return values;
}

} // namespace

SqliteFile::SqliteFile(const std::string& path) : handle_(std::make_unique<Handle>()) {
    handle_->path = path;
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) refuse("cannot read {}: not a file", path);
    const int opened =
        sqlite3_open_v2(path.c_str(), &handle_->database, SQLITE_OPEN_READONLY | SQLITE_OPEN_NOMUTEX, nullptr);
    sqlite3* const database = handle_->database;
    if (opened != SQLITE_OK) refuse("cannot read {}: {}", path, sqlite3_errstr(opened));
    sqlite3_db_config(database, SQLITE_DBCONFIG_DEFENSIVE, 1, nullptr);
    sqlite3_db_config(database, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, nullptr);
    sqlite3_db_config(database, SQLITE_DBCONFIG_ENABLE_TRIGGER, 0, nullptr);
    sqlite3_db_config(database, SQLITE_DBCONFIG_ENABLE_VIEW, 0, nullptr);
    sqlite3_limit(database, SQLITE_LIMIT_LENGTH, most_text_bytes);
    sqlite3_limit(database, SQLITE_LIMIT_COLUMN, most_columns);
    sqlite3_limit(database, SQLITE_LIMIT_EXPR_DEPTH, most_expression_depth);
    sqlite3_limit(database, SQLITE_LIMIT_SQL_LENGTH, most_sql_bytes);
    handle_->tables = column_of(database, path,
                                "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%'", 0);
}

SqliteFile::~SqliteFile() = default;

bool SqliteFile::has_table(const std::string& name) const {
    return std::find(handle_->tables.begin(), handle_->tables.end(), name) != handle_->tables.end();
}

SqliteRows SqliteFile::rows(const std::string& table, const std::vector<std::string>& columns) const {
    const std::vector<std::string> present =
        column_of(handle_->database, handle_->path, fmt::format("PRAGMA table_info({})", sql_name(table)), 1);
    auto statement = std::make_unique<SqliteRows::Statement>();
    std::string list;
    for (const std::string& asked : columns) {
        const bool optional = asked.starts_with('?');
        const std::string column = asked.substr(optional ? 1 : 0);
        const bool there = std::find(present.begin(), present.end(), column) != present.end();
        if (!there && !optional)
            refuse("{}: table {} has no column {}: not an export of Nsight Systems", handle_->path, table, column);
        list += (list.empty() ? "" : ", ") + (there ? sql_name(column) : std::string("NULL"));
        statement->columns.push_back(column);
    }
    statement->database = handle_->database;
    statement->path = handle_->path;
    statement->table = table;
    statement->statement =
        prepared(handle_->database, handle_->path, fmt::format("SELECT {} FROM {}", list, sql_name(table)));
    return SqliteRows(std::move(statement));
}

SqliteRows::SqliteRows(std::unique_ptr<Statement> statement) : statement_(std::move(statement)) {}
SqliteRows::SqliteRows(SqliteRows&&) noexcept = default;
SqliteRows::~SqliteRows() = default;

bool SqliteRows::next() {
    const int state = sqlite3_step(statement_->statement);
    if (state == SQLITE_ROW) return true;
    if (state != SQLITE_DONE)
        refuse("{}: table {}: {}", statement_->path, statement_->table, sqlite3_errmsg(statement_->database));
    return false;
}

bool SqliteRows::is_null(int column) const { return sqlite3_column_type(statement_->statement, column) == SQLITE_NULL; }

std::int64_t SqliteRows::integer(int column) const {
    const int type = sqlite3_column_type(statement_->statement, column);
    if (type != SQLITE_INTEGER && type != SQLITE_NULL && type != SQLITE_FLOAT)
        refuse("{}: table {}: {} is no number", statement_->path, statement_->table,
               statement_->columns[static_cast<std::size_t>(column)]);
    return sqlite3_column_int64(statement_->statement, column);
}

std::string SqliteRows::text(int column) const {
    const unsigned char* const bytes = sqlite3_column_text(statement_->statement, column);
    if (bytes == nullptr) return "";
    return {reinterpret_cast<const char*>(bytes),
            static_cast<std::size_t>(sqlite3_column_bytes(statement_->statement, column))};
}

} // namespace moe::tools
